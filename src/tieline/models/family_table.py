"""The families of transformers, read from their sources at version 5.22: composed of few patterns.

pattern             ranks                              weights
softmax             softmax(z), which is ranking z     p_i, renormalised or not
softmax_of_chosen   z                                  softmax over the chosen
biased_softmax      softmax(z) + bias                  p_i
sigmoid             sigmoid(z) + bias                  sigmoid(z_i), renormalised or not
single_sigmoid      sigmoid of z cast to float32       the same
grouped_sigmoid     the same inside the best groups    the same
"""

from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from tieline.models.families import Combine, GroupRule, RouterFamily, register_family
from tieline.models.router_output_layouts import DenseLayout, SortedLayout, TupleLayout

_BIAS = "e_score_correction_bias"
_ERNIE_BIAS = "moe_statics.e_score_correction_bias"
_FLAG = "norm_topk_prob"
_SCALE = "routed_scaling_factor"
_BEST_GROUPS = GroupRule(score="max", when=("topk_method", "group_limited_greedy"))
_SOFTMAX_GROUPS = GroupRule(fill=0.0, ranked="softmax")
_SCALED = "the block scales the output"
_JITTER = "the block multiplies the router's input by noise in training"
_ENCODER_DECODER = "encoder and decoder layers see different tokens, and capacity drops tokens"

softmax = partial(RouterFamily, eager_skip="with interface")
softmax_flag = partial(softmax, renormalise=_FLAG)
softmax_of_chosen = partial(softmax, combine="softmax of chosen", renormalise="never")
best_softmax = partial(softmax, groups=_BEST_GROUPS, renormalise="never", scale=_SCALE)
# routers that compute float32 logits activate them as they are, which autocast makes bfloat16
biased_softmax = partial(softmax, ranked="softmax", bias=_BIAS, own_dtype=True)
sigmoid = partial(softmax, ranked="sigmoid", combine="sigmoid", bias=_BIAS, own_dtype=True)
single_sigmoid = partial(sigmoid, own_dtype=False, sum_offset=0.0)
grouped_sigmoid = partial(sigmoid, groups=GroupRule(), renormalise=_FLAG, scale=_SCALE)
gemma_softmax = partial(
    softmax,
    weight=None,
    probabilities=True,
    k="config.top_k_experts",
    n_experts="proj.out_features",
    scale="per_expert_scale",
)
refuse = partial(softmax, layout=DenseLayout(), weight=None)


def _configured_combine(router: nn.Module) -> Combine:
    """The function of the chosen logits that the configuration of Cohere 2 names."""
    function = attrgetter("expert_selection_fn")(router)
    return "softmax of chosen" if function == "softmax" else "sigmoid"


def _route_scale(router: nn.Module) -> Any:
    """The factor of the weights of a router with two scales."""
    return attrgetter("route_scale")(router) * attrgetter("global_scale")(router)


def _one_over_k(router: nn.Module) -> float:
    """The factor 1/k of weights that are averaged over the chosen experts."""
    return 1 / int(attrgetter("top_k")(router))


TRANSFORMERS_FAMILIES: tuple[RouterFamily, ...] = (
    sigmoid(
        "afmoe",
        ("AfmoeTokenChoiceRouter",),
        bias=None,
        bias_argument="expert_bias",
        scale="route_scale",
        weight="gate.weight",
    ),
    softmax_of_chosen("aria", ("AriaTextTopKRouter",)),
    grouped_sigmoid("axk1", ("AXK1TopkRouter",)),
    grouped_sigmoid("axk2", ("AXK2TopkRouter",), groups=GroupRule(fill=0.0)),
    grouped_sigmoid("bailing_hybrid", ("BailingHybridTopkRouter",)),
    grouped_sigmoid("beam", ("BeamTopKRouter",), scale=None, note=_SCALED),
    softmax_of_chosen(
        "cohere2_moe",
        ("Cohere2MoeTopKRouter",),
        combine=_configured_combine,
        renormalise=_FLAG,
        note="weights by softmax or sigmoid of the chosen, as configured",
    ),
    softmax(
        "dbrx",
        ("DbrxFFN",),
        layout=TupleLayout(None, 0, 1),
        method="route_tokens_to_experts",
        own_dtype=True,
        weight="router.layer.weight",
        n_experts="experts.num_experts",
        norm_order="moe_normalize_expert_weights",
        note="observed in the block, which sees no router inputs; p-norm; jitter in training",
    ),
    best_softmax("deepseek_ocr2", ("DeepseekOcr2TextTopkRouter",)),
    best_softmax("deepseek_v2", ("DeepseekV2TopkRouter",)),
    grouped_sigmoid("deepseek_v3", ("DeepseekV3TopkRouter",)),
    grouped_sigmoid("deepseek_v32", ("DeepseekV32TopkRouter",)),
    softmax(
        "deepseek_v4",
        ("DeepseekV4TopKRouter",),
        ranked="activation",
        activation="score_fn",
        own_dtype=True,
        bias=_BIAS,
        combine="activation",
        scale=_SCALE,
        note="the first layers are hash layers, which are refused: choose `layers` without them",
    ),
    refuse(
        "deepseek_v4",
        ("DeepseekV4HashRouter",),
        refused="hash layers look experts up by token id: their choice is no function of scores",
    ),
    gemma_softmax(
        "diffusion_gemma",
        ("DiffusionGemmaTextRouter",),
        note="encoder and decoder see different tokens: capture one of them",
    ),
    refuse(
        "doge",
        ("DogeCDMoE",),
        refused="the product-key router inside the block scores a token from the logits of others",
    ),
    grouped_sigmoid("dots1", ("Dots1TopkRouter",)),
    biased_softmax(
        "ernie4_5_moe", ("Ernie4_5_MoeTopKRouter",), bias=_ERNIE_BIAS, least_sum="norm_min"
    ),
    biased_softmax(
        "ernie4_5_vl_moe",
        ("Ernie4_5_VLMoeMoeTopKRouter",),
        bias=_ERNIE_BIAS,
        least_sum="norm_min",
        note="text-only input: with images, text and vision routers see different tokens",
    ),
    grouped_sigmoid("exaone_moe", ("ExaoneMoeTopkRouter",)),
    softmax_flag("flex_olmo", ("FlexOlmoTopKRouter",)),
    sigmoid("flint", ("FlintTopKRouter",), bias=None, renormalise=_FLAG, sum_offset=0.0),
    gemma_softmax("gemma4", ("Gemma4TextRouter",)),
    grouped_sigmoid("glm4_moe", ("Glm4MoeTopkRouter",)),
    grouped_sigmoid("glm4_moe_lite", ("Glm4MoeLiteTopkRouter",)),
    grouped_sigmoid("glm4v_moe", ("Glm4vMoeTextTopkRouter",)),
    grouped_sigmoid("glm5_next", ("Glm5NextTextTopkRouter",)),
    grouped_sigmoid("glm_moe_dsa", ("GlmMoeDsaTopkRouter",)),
    softmax_of_chosen("gpt_oss", ("GptOssTopKRouter",), eager_skip="never"),
    softmax_of_chosen("granitemoe", ("GraniteMoeTopKRouter",)),
    softmax_of_chosen("granitemoe_swa", ("GraniteMoeSWATopKRouter",)),
    softmax_of_chosen("granitemoehybrid", ("GraniteMoeHybridTopKRouter",)),
    softmax_of_chosen("granitemoeshared", ("GraniteMoeSharedTopKRouter",)),
    softmax("hunyuan_v1_moe", ("HunYuanMoEV1Gate",), weight="wg.weight"),
    sigmoid(
        "hy_v3",
        ("HYV3TopKRouter",),
        bias=None,
        bias_argument=_BIAS,
        scale="router_scaling_factor",
    ),
    grouped_sigmoid("hy_v4", ("HYV4TopkRouter",)),
    sigmoid(
        "inkling",
        ("InklingTopkRouter",),
        own_dtype=True,
        scale=_route_scale,
        shared_weights=3,
        note="weights are normalised together with those of the shared experts",
    ),
    softmax("jamba", ("JambaTopKRouter",), renormalise="never"),
    softmax_of_chosen(
        "jetmoe",
        ("JetMoeTopKGating",),
        layout=SortedLayout(),
        counts_columns=True,
        weight="layer.weight",
        note="attention and feed-forward are both routed: two layers per block",
    ),
    grouped_sigmoid("kimi_linear", ("KimiLinearTopkRouter",)),
    softmax("kolibri1", ("Kolibri1TopKRouter",), bias=_BIAS, combine="sigmoid", renormalise=_FLAG),
    sigmoid(
        "laguna", ("LagunaTopKRouter",), note=f"the returned logits are soft-capped; {_SCALED}"
    ),
    sigmoid(
        "lfm2_moe",
        ("Lfm2MoeTopKRouter",),
        bias=None,
        bias_argument="expert_bias",
        bias_flag="use_expert_bias",
        renormalise=_FLAG,
        sum_offset=1e-6,
        scale=_SCALE,
    ),
    softmax(
        "llama4",
        ("Llama4Router",),
        layout=DenseLayout(),
        combine="sigmoid",
        renormalise="never",
        note="the weight multiplies the expert's input",
    ),
    biased_softmax(
        "longcat_flash",
        ("LongcatFlashTopkRouter",),
        renormalise="never",
        scale=_SCALE,
        weight="classifier.weight",
        n_experts="n_routed_experts",
        identity_experts=("zero_expert_num", "num_routed_experts"),
        note="the last experts are zero-computation experts",
    ),
    softmax_flag("mellum", ("MellumTopKRouter",)),
    grouped_sigmoid("mimo_v2_flash", ("MiMoV2FlashTopkRouter",)),
    softmax("minimax", ("MiniMaxTopKRouter",), note=_JITTER),
    single_sigmoid(
        "minimax_m2", ("MiniMaxM2TopKRouter",), bias=None, bias_argument=_BIAS, note=_JITTER
    ),
    single_sigmoid("minimax_m3_vl", ("MiniMaxM3VLTopKRouter",), note=_SCALED),
    softmax(
        "mistral4",
        ("Mistral4TopkRouter",),
        own_dtype=True,
        groups=_SOFTMAX_GROUPS,
        renormalise=_FLAG,
        scale=_SCALE,
    ),
    softmax(
        "mistral_large4",
        ("MistralLarge4TextTopkRouter",),
        own_dtype=True,
        groups=_SOFTMAX_GROUPS,
        scale=_SCALE,
    ),
    softmax("mixtral", ("MixtralTopKRouter",), note=_JITTER),
    sigmoid(
        "muse_spark",
        ("MuseSparkTopkRouter",),
        sum_offset=1e-15,
        scale=_SCALE,
        note="logits carry a multiplier",
    ),
    grouped_sigmoid("nemotron_h", ("NemotronHTopkRouter",), eager_skip="never"),
    refuse("nllb_moe", ("NllbMoeTop2Router",), refused=_ENCODER_DECODER),
    softmax_flag("olmoe", ("OlmoeTopKRouter",), pipeline_checked=True),
    softmax_of_chosen(
        "openai_privacy_filter",
        ("OpenAIPrivacyFilterTopKRouter",),
        scale=_one_over_k,
        eager_skip="never",
        note="softmax of the chosen divided by k; the block multiplies by k",
    ),
    softmax_of_chosen(
        "phimoe",
        ("PhimoeTopKRouter",),
        refused_weights="the weights of sparsemixer are taken over the experts inside a jitter "
        "band of their own, which jump however the choice is smoothed",
        refused_in_training="sparsemixer samples its experts in training mode",
        note="sparsemixer weights; in evaluation the choice is the top 2 of the logits",
    ),
    softmax_flag("qwen2_moe", ("Qwen2MoeTopKRouter",)),
    softmax("qwen3_5_moe", ("Qwen3_5MoeTopKRouter",)),
    softmax_flag("qwen3_moe", ("Qwen3MoeTopKRouter",)),
    softmax_flag("qwen3_next", ("Qwen3NextTopKRouter",)),
    softmax_flag(
        "qwen3_omni_moe",
        ("Qwen3OmniMoeThinkerTextTopKRouter", "Qwen3OmniMoeTalkerTextTopKRouter"),
        note="thinker and talker see different tokens: capture one of them",
    ),
    softmax("qwen3_omni_moe", ("Qwen3OmniMoeTextTopKRouter",)),
    softmax("qwen3_vl_moe", ("Qwen3VLMoeTextTopKRouter",)),
    softmax_flag("qwen4_exp", ("Qwen4ExpTextTopKRouter",)),
    grouped_sigmoid("solar_open", ("SolarOpenTopkRouter",)),
    single_sigmoid("step3p7", ("Step3p7TopKRouter",), eager_skip="always", note=_SCALED),
    refuse("switch_transformers", ("SwitchTransformersTop1Router",), refused=_ENCODER_DECODER),
    best_softmax("unlimited_ocr", ("UnlimitedOcrTextTopkRouter",)),
    refuse(
        "vitpose_backbone",
        ("VitPoseNaiveMoe",),
        refused="experts are picked by data set, not by a router",
    ),
    biased_softmax(
        "zaya",
        ("ZayaRouter",),
        bias="balancing_biases",
        skip_class=True,
        renormalise="never",
        note="the last class skips all experts",
    ),
)

for _family in TRANSFORMERS_FAMILIES:
    register_family(_family)
