"""tieline diff A B: whether two runs route alike and, if not, why."""

from typing import Annotated, Any

import typer

from tieline.analysis.job_settings import DiffSettings
from tieline.cli.app import CONDITION_HELD, app, guarded, say
from tieline.cli.deliver import Outputs, deliver, run_job
from tieline.cli.options import Html, Json, Overwrite
from tieline.cli.ranks import is_first
from tieline.core.setting_fields import SettingError, Settings, read_share, setting

SIDE = (
    "Folder of a trace, file of an engine (.npy, .npz, .safetensors, .csv, .jsonl), model, or "
    "model in an engine: vllm:MODEL, mlx:MODEL, llama.cpp:FILE.gguf."
)


class DiffLimits(Settings):
    """Shares that fail the command if any layer exceeds them."""

    max_flip: float | None = setting(
        None,
        read=read_share,
        help="Exit with 1 if any layer's flip rate exceeds this: 0.01 or 1%.",
    )
    max_unexplained: float | None = setting(
        None,
        read=read_share,
        help="Exit with 1 if more of any layer's tokens flip beyond their noise.",
    )


@app.command()
@guarded
def diff(
    *,
    a: Annotated[str, typer.Argument(help=f"{SIDE} 'demo' is the one in the box.")],
    b: Annotated[str, typer.Argument(help="The same for the other side.")],
    settings: DiffSettings,
    limits: DiffLimits,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare the experts that two runs choose, and tell whether ties explain differences."""
    outputs = Outputs(html, json_to, overwrite=overwrite)
    outputs.check(a, b, settings.text)
    result = run_job("tieline.analysis.diff:diff", a, b, settings=settings, doing="comparing")
    _check_attributable(limits, result)
    deliver(result, outputs, "add --html diff.html for the page with charts")
    _exit_on_exceeded_limits(limits, result.metrics)


def _check_attributable(limits: DiffLimits, result: Any) -> None:
    """Refuse a limit on unexplained flips where flips cannot be attributed."""
    if limits.max_unexplained is not None and "unexplained" not in result.metrics:
        from tieline.core.text import layer_label

        layer = next(layer for layer in result.layers if layer.attribution is None)
        raise SettingError(
            "{max_unexplained}: {layer} is {status}",
            layer=layer_label(layer.name),
            status=layer.attribution_status,
        )


def _exit_on_exceeded_limits(limits: DiffLimits, metrics: dict[str, float]) -> None:
    """Exit with 1 if a layer exceeds a limit."""
    from tieline.report.words.numbers import percent

    most = {"flip": limits.max_flip, "unexplained": limits.max_unexplained}
    exceeded = {n: share for n, share in most.items() if share is not None and metrics[n] > share}
    for name, share in exceeded.items() if is_first() else ():
        worst = percent(metrics[name])
        say(f"failed: --max-{name} {percent(share)} (the worst layer has {worst})")
    if exceeded:
        raise typer.Exit(CONDITION_HELD)
