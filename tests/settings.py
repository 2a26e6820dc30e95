"""The settings classes of all jobs, their functions, and the rules between their fields."""

from tieline.analysis.job_settings import (
    AuditSettings,
    CheckSettings,
    ConvertSettings,
    DiffSettings,
    InspectSettings,
    MergeSettings,
    ServeCheckSettings,
    SmoothSettings,
)
from tieline.lab.command_settings import (
    AttentionSettings,
    DesignSettings,
    FrontierSettings,
    RatesSettings,
    ReproduceSettings,
    RerouteSettings,
    SliceSettings,
    SoftenSettings,
    TrainSettings,
    UpcycleSettings,
    WalksSettings,
)
from tieline.run.shared_settings import CaptureSettings

JOBS = {
    AuditSettings: ("tieline.analysis.audit", "audit"),
    SmoothSettings: ("tieline.analysis.smooth", "smooth"),
    FrontierSettings: ("tieline.lab.on_model.frontier", "frontier"),
    CaptureSettings: ("tieline.engines.engine_capture", "capture_engine"),
    CheckSettings: ("tieline.analysis.check", "check"),
    ConvertSettings: ("tieline.analysis.route_files", "convert"),
    DiffSettings: ("tieline.analysis.diff", "diff"),
    InspectSettings: ("tieline.analysis.inspect", "inspect"),
    MergeSettings: ("tieline.analysis.route_files", "merge"),
    ServeCheckSettings: ("tieline.analysis.serve_check", "serve_check"),
    DesignSettings: ("tieline.lab.on_model.design", "design"),
    ReproduceSettings: ("tieline.lab.claims", "reproduce"),
    RerouteSettings: ("tieline.lab.on_model.reroute", "reroute"),
    AttentionSettings: ("tieline.lab.attention.head_view", "attention_view"),
    SliceSettings: ("tieline.lab.on_model.slice", "slice_model"),
    SoftenSettings: ("tieline.lab.on_model.soften", "soften"),
    WalksSettings: ("tieline.lab.on_model.walks", "walks"),
    TrainSettings: ("tieline.lab.training", "train"),
    UpcycleSettings: ("tieline.lab.on_model.upcycle", "upcycle"),
}
"""The function that takes each settings class."""

SETTINGS = (*JOBS, RatesSettings)
"""All of them; a rate study is called with the plan that its settings describe."""

EXAMPLES = {ConvertSettings: {"to": "npz"}, DesignSettings: {"preset": "olmoe"}}
"""Fields that have no default, or of which one must be given."""

OUT = ["-o", "/nowhere/out"]

RULES = [
    (AuditSettings, {"recover": 0.0}, ["--recover", "0"], "--recover is a share of the damage"),
    (
        AuditSettings,
        {"budget_minutes": 1.0, "parallel": "data"},
        ["--budget-minutes", "1", "--parallel", "data"],
        "--budget-minutes goes by the clock of one process",
    ),
    (
        SmoothSettings,
        {"factor": 8.0, "budget": 2.3},
        ["--factor", "8", "--budget", "2.3"],
        "--factor and --budget each choose ε: give one of them",
    ),
    (
        SmoothSettings,
        {"epsilon": 0.1, "noise": "bf16"},
        ["--epsilon", "0.1", "--noise", "bf16"],
        "--epsilon goes with no other choice of ε: leave out --noise",
    ),
    (
        SmoothSettings,
        {"parallel": "ep"},
        ["--parallel", "ep"],
        "--parallel ep: smoothing compares a whole model with a whole copy of it",
    ),
    (
        FrontierSettings,
        {"gate": "soft"},
        ["--gate", "soft"],
        "--gate must be one of projected, ramp, got 'soft'",
    ),
    (SliceSettings, {"layer": "1-2"}, ["--layer", "1-2"], "--layer takes one layer, got '1-2'"),
    (
        SliceSettings,
        {"places": "1,2.5,3"},
        ["--places", "1,2.5,3"],
        "--places takes whole numbers, got '1,2.5,3'",
    ),
    (SoftenSettings, {"tokens": 64}, ["--tokens", "64"], "--tokens must be at least 256, got 64"),
    (
        InspectSettings,
        {"layers": "3-1"},
        ["--layers", "3-1"],
        "--layers has ranges from a lower layer to a higher one, not '3-1', got '3-1'",
    ),
    (
        InspectSettings,
        {"parallel": "pp", "loss_jumps": True},
        ["--parallel", "pp", "--loss-jumps"],
        "--loss-jumps needs all layers: take --parallel tp or ep with it",
    ),
    (
        InspectSettings,
        {"dtype": "fp7"},
        ["--dtype", "fp7"],
        "--dtype must be one of auto, fp32, bf16, fp16, got 'fp7'",
    ),
    (
        CaptureSettings,
        {"text": "a", "ids": "b"},
        ["--text", "a", "--ids", "b", *OUT],
        "--text, --ids, --tokens-from and --prompts exclude each other",
    ),
    (
        CaptureSettings,
        {"engine_defaults": True},
        ["--engine-defaults", *OUT],
        "--engine-defaults is for other engines than transformers",
    ),
    (
        CaptureSettings,
        {"engine": "vllm", "stream": True},
        ["--engine", "vllm", "--stream", *OUT],
        "--stream is for transformers",
    ),
    (
        CaptureSettings,
        {"memory": "much"},
        ["--memory", "much", *OUT],
        "--memory is a size such as 8G or 800M, got 'much'",
    ),
    (
        CaptureSettings,
        {"parallel": "xx"},
        ["--parallel", "xx", *OUT],
        "--parallel must be one of data, tp, ep, pp, fsdp, got 'xx'",
    ),
    (
        ServeCheckSettings,
        {"count": 1},
        ["http://127.0.0.1:1", "--count", "1"],
        "--count must be at least 2, got 1",
    ),
    (CheckSettings, {"k": 0}, ["a.npy", "-k", "0"], "--k must be at least 1, got 0"),
    (
        ConvertSettings,
        {"start": -1},
        ["a", "b", "--to", "npz", "--start", "-1"],
        "--start must be at least 0, got -1",
    ),
    (
        DiffSettings,
        {"parallel": "pp", "replay": True},
        ["a", "b", "--parallel", "pp", "--replay"],
        "--replay needs all layers in every process: take --parallel data, tp or ep, not pp",
    ),
    (
        DiffSettings,
        {"parallel": "fsdp", "batch_size_b": 2},
        ["a", "b", "--parallel", "fsdp", "--batch-size-b", "2"],
        "--batch-size-b: processes that gather weights by fsdp run equally many passes",
    ),
    (
        DesignSettings,
        {"n_experts": 4},
        ["--preset", "olmoe", "--n-experts", "4"],
        "say which layer: --n-experts, --k and --expert-width, or --preset, or --model",
    ),
    (
        DesignSettings,
        {"measure": True},
        ["--preset", "olmoe", "--measure"],
        "--measure runs a model: name it with --model",
    ),
    (DesignSettings, {"split": "0"}, ["--preset", "olmoe", "--split", "0"], "--split takes"),
    (
        RatesSettings,
        {"address": "tcp://x:1"},
        ["p2-1a-cosine", "--address", "tcp://x:1"],
        "--address is for --executor dask, not loky",
    ),
    (
        ReproduceSettings,
        {"jobs": 0},
        ["--jobs", "0"],
        "--jobs must be at least 1, or -1 for one per core, got 0",
    ),
    (
        RerouteSettings,
        {"rank": 4},
        ["--rank", "4"],
        "--rank is an option of another router than 'perturbed'",
    ),
    (RerouteSettings, {"tau": "0.1"}, ["--tau", "0.1"], "--tau takes two numbers"),
    (
        UpcycleSettings,
        {"k": 9},
        ["m", *OUT, "--k", "9"],
        "--k 9 of 8 experts: it must be at most --n-experts",
    ),
]
"""A class, values that break a rule, what one types for them, and the message on the terminal."""
