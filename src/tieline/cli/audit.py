"""tieline audit [MODEL]: what low precision and noise do to a model's routing."""

from tieline.analysis.settings import AuditSettings
from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Html, Json, ModelName, Overwrite
from tieline.cli.ranks import joined


@app.command()
@guarded
def audit(
    *,
    model: ModelName = "demo",
    settings: AuditSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure what low precision and noise do to a model's routing, and what to keep in float32."""
    outputs = Outputs(html, json_to, overwrite=overwrite)
    outputs.check(model, settings.text)
    with progress_bars() as progress, joined(settings.parallel, "auditing") as parallel:
        from tieline.analysis.audit import audit as run
        from tieline.analysis.sources import quiet_transformers

        quiet_transformers()
        result = run(model, settings=settings, parallel=parallel, progress=progress)
    deliver(result, outputs, "add --html audit.html for the page with charts")
