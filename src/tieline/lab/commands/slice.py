"""tieline slice [MODEL]: the plane through three tokens' hidden states at one router."""

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Figure, Html, Json, ModelName, Overwrite
from tieline.lab.settings import SliceSettings


@app.command("slice")
@guarded
def slice_command(
    *,
    model: ModelName = "demo",
    settings: SliceSettings,
    html: Html = None,
    json_to: Json = None,
    figure: Figure = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw the plane through three tokens' hidden states at one router, and check it."""
    outputs = Outputs(html, json_to, figure, overwrite=overwrite, page_package="jinja2")
    outputs.check(model, settings.text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.slice import slice_model as run

        quiet_transformers()
        result = run(model, settings=settings, progress=progress)
    deliver(result, outputs, "add --html page.html for the page")
