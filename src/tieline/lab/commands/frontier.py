"""tieline frontier [MODEL]: how much repair smoothing buys, at which price, width by width."""

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Figure, Html, Json, ModelName, Overwrite
from tieline.lab.settings import FrontierSettings


@app.command()
@guarded
def frontier(
    *,
    model: ModelName = "demo",
    settings: FrontierSettings,
    html: Html = None,
    json_to: Json = None,
    figure: Figure = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure smoothed forms of a model of many widths, and hold the law against its layers."""
    outputs = Outputs(html, json_to, figure, overwrite=overwrite)
    outputs.check(model, settings.text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.frontier import frontier as run

        quiet_transformers()
        result = run(model, settings=settings, progress=progress)
    deliver(result, outputs, "add --html page.html for the page")
