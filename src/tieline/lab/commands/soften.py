"""tieline soften [MODEL]: what a soft choice of experts does to the loss of a model."""

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Figure, Html, Json, ModelName, Overwrite
from tieline.lab.settings import SoftenSettings


@app.command()
@guarded
def soften(
    *,
    model: ModelName = "demo",
    settings: SoftenSettings,
    html: Html = None,
    json_to: Json = None,
    figure: Figure = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure and predict what a soft choice does to the loss, layer by layer."""
    outputs = Outputs(html, json_to, figure, overwrite=overwrite)
    outputs.check(model, settings.text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.soften import soften as run

        quiet_transformers()
        result = run(model, settings=settings, progress=progress)
    deliver(result, outputs, "add --html page.html for the page")
