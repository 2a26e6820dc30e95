"""BERT for sentences and pairs of them, with one feed-forward network turned into a mixture.

Paper 1, Table 2: BERT-large, one network of 24 replaced by 16 experts, top 2 or 4. The small form
has the same parts at random weights: it shows that everything runs, and no more.
"""

from dataclasses import dataclass

from transformers import BertConfig, BertForSequenceClassification

from tieline.errors import require
from tieline.training.config import GateConfig, ModelConfig
from tieline.training.pretrained import local_checkpoint
from tieline.training.upcycled import route_networks_

__all__ = ["SentenceConfig", "sentence_model"]


@dataclass(frozen=True, kw_only=True)
class SentenceConfig(ModelConfig):
    """Shape of the model.

    Attributes:
        layers: blocks.
        d_model: width.
        d_hidden: width of a network and of an expert.
        heads: attention heads.
        vocabulary: number of tokens; the last three are [CLS], [SEP] and padding where the
            vocabulary is learnt from the task's sentences.
        context: tokens of an example at most.
        routed: the block whose network is replaced, counted from 0.
        n_experts: experts of it.
        pretrained: name on the hub or folder of the weights to start from; None for random ones.
    """

    layers: int
    d_model: int
    d_hidden: int
    heads: int
    vocabulary: int
    context: int
    routed: int
    n_experts: int = 16
    pretrained: str | None = None

    def __post_init__(self) -> None:
        require(0 <= self.routed < self.layers, f"block {self.routed} of only {self.layers}")


def sentence_model(shape: SentenceConfig, gate: GateConfig) -> BertForSequenceClassification:
    """The model at its start, pretrained where the weights are here."""
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.d_model,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.d_hidden,
        max_position_embeddings=max(512, shape.context),
    )
    place = None if shape.pretrained is None else local_checkpoint(shape.pretrained)
    if place is None:
        model = BertForSequenceClassification(config)
    else:
        model = BertForSequenceClassification.from_pretrained(place)
    route_networks_(model, [shape.routed], gate, shape.n_experts)
    return model
