"""tieline walks [MODEL]: how many roundings until a token changes its experts."""

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Figure, Html, Json, ModelName, Overwrite
from tieline.lab.settings import WalksSettings


@app.command()
@guarded
def walks(
    *,
    model: ModelName = "demo",
    settings: WalksSettings,
    html: Html = None,
    json_to: Json = None,
    figure: Figure = None,
    overwrite: Overwrite = False,
) -> None:
    """Simulate how long tokens keep their experts as the noise of bf16 collects."""
    outputs = Outputs(html, json_to, figure, overwrite=overwrite)
    outputs.check(model, settings.text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.walks import walks as run

        quiet_transformers()
        result = run(model, settings=settings, progress=progress)
    deliver(result, outputs, "add --html page.html for the page")
