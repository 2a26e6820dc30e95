"""tieline audit [MODEL]: what low precision and noise do to a model's routing."""

from tieline.analysis.job_settings import AuditSettings
from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, run_job
from tieline.cli.options import Html, Json, ModelName, Overwrite


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
    result = run_job("tieline.analysis.audit:audit", model, settings=settings, doing="auditing")
    deliver(result, outputs, "add --html audit.html for the page with charts")
