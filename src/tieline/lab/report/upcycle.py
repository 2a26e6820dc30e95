"""What `tieline upcycle` made: a few lines and one table, no figures."""

from tieline.lab.on_model.upcycle import Upcycled
from tieline.report.made import MadeViews


def _lines(result: Upcycled) -> list[str]:
    """Size of the new model, parameters, change of outputs and loss."""
    lines = [
        f"{len(result.layers)} networks became mixtures of {result.n_experts} experts, "
        f"top-{result.k}",
        f"parameters: {result.parameters_before:,} before, {result.parameters_after:,} after, "
        f"{result.parameters_per_token:,} per token",
        f"largest change of an output, relative: {result.output_change:.1e}",
    ]
    before, after = result.loss_before, result.loss_after
    if before is not None and after is not None:
        error = "" if before.error is None else f" (± {before.error:.4f} over sequences)"
        lines.append(
            f"loss on {before.tokens:,} tokens: {before.value:.6f} before, {after.value:.6f} after"
            f"{error}"
        )
    return lines


_VIEWS = MadeViews(_lines)
page, figures, terminal = _VIEWS.page, _VIEWS.figures, _VIEWS.terminal
summary, notebook = _VIEWS.summary, _VIEWS.notebook
