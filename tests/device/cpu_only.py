"""Tests that are about the CPU, and why: they are skipped on another device.

A test carries `@pytest.mark.cpu("reason")`, or stands in the table below, by the path of its file
and, where only some tests of the file are meant, a part of their names. Tests of `RECORDS` are not
skipped: they make their inputs, which are records, on the CPU.
"""

_NO_BACKEND = "torch's processes and compilers know no device that is registered in Python"
_ONE_FILE = "transformers writes all tensors of the pretended device to one file"
_NO_PICKLE = "pickles and torch.save hold no data of a pretended tensor"
_NEW_PROCESS = "compares with a process of its own, which starts without the device"

REASONS: dict[tuple[str, str], str] = {
    ("tests/models/pass_tokens/test_wrapped.py", "compile"): _NO_BACKEND,
    ("tests/models/pass_tokens/test_wrapped.py", "DataParallel"): _NO_BACKEND,
    ("tests/models/pass_tokens/test_wrapped.py", "both"): _NO_BACKEND,
    ("tests/models/pass_tokens/test_wrapped.py", "FSDP"): _NO_BACKEND,
    ("tests/models/pass_tokens/test_wrapped.py", "auxiliary_loss"): _NO_BACKEND,
    ("tests/models/model/test_damaged.py", "cut_off"): _ONE_FILE,
    ("tests/models/model/test_damaged.py", "absent"): _ONE_FILE,
    ("tests/models/saved_models/test_files.py", "sharded"): _ONE_FILE,
    ("tests/models/model/test_model.py", "pickled"): _NO_PICKLE,
    ("tests/models/smoothed_model/test_portable.py", "without_tieline_to_the_bit"): _NEW_PROCESS,
    ("tests/models/smoothed_model/test_portable.py", "pickled[<lambda>"): _NO_PICKLE,
    ("tests/run/test_runner.py", "computed_once_per_batch"): "a patched method counts twice there",
    ("tests/analysis/test_recompute.py", "compiled"): _NO_BACKEND,
    (
        "tests/models/number_formats/test_number_formats.py",
        "rounding_in_place_is_rounding[<lambda>1",
    ): "strides of a pretended tensor are not those of its data",
    ("tests/models/experts/test_used_slots.py", "rows"): "an accelerator gathers all slots",
}


RECORDS = (
    "tests/trace",
    "tests/models/test_shards",
    "tests/measure/test_expert_load",
    "tests/measure/test_calibration_need",
    "tests/measure/test_summary_measures",
    *(
        f"tests/analysis/{part}"
        for part in (
            "attribution",
            "audit/test_verdict",
            "diff/test_traces",
            "inspect/test_inspect_observations",
            "jumps",
            "oracles/test_oracle_scores",
            "router_effects/test_predicted_flips",
            "score_noise",
            "test_alignment",
            "test_excess_over_sound_runs",
            "test_noise_shapes",
            "test_route_files",
            "test_served_precision",
        )
    ),
)
"""Tests of records, which are on the CPU whatever the default device of torch is."""


def has_records(node) -> bool:
    """Whether the inputs of a test, or of the tests of a file, are records."""
    return _path(node).startswith(RECORDS)


def _path(node) -> str:
    inside = node.path.is_relative_to(node.config.rootpath)
    return node.path.relative_to(node.config.rootpath).as_posix() if inside else ""


def reason(item) -> str | None:
    """Why a test stays on the CPU; None if it runs anywhere."""
    marker = item.get_closest_marker("cpu")
    if marker is not None:
        return marker.args[0]
    matches = (
        why
        for (file, name), why in REASONS.items()
        if _path(item).startswith(file) and name in item.name
    )
    return next(matches, None)
