"""tieline attention [MODEL]: a model's attention heads as mixtures of keys."""

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Figure, Html, Json, ModelName, Overwrite
from tieline.lab.settings import AttentionSettings


@app.command()
@guarded
def attention(
    *,
    model: ModelName = "demo",
    settings: AttentionSettings,
    html: Html = None,
    json_to: Json = None,
    figure: Figure = None,
    overwrite: Overwrite = False,
) -> None:
    """Look at attention heads as mixtures of keys, and at what sigmoid attention would change."""
    outputs = Outputs(html, json_to, figure, overwrite=overwrite, page_package="matplotlib")
    outputs.check(model, settings.text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.attention.view import attention_view as run

        quiet_transformers()
        result = run(model, settings=settings, progress=progress)
    deliver(result, outputs, "add --html page.html for the page")
