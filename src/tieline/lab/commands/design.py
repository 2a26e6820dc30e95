"""tieline design: what a number of experts, active experts and expert width buys."""

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Figure, Html, Json, Overwrite
from tieline.lab.settings import DesignSettings


@app.command()
@guarded
def design(
    *,
    settings: DesignSettings,
    html: Html = None,
    figure: Figure = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare the bounds, expected pieces, switches and ties of a layer at each granularity.

    Nothing but --measure is random: there --seed draws the pairs of tokens.
    """
    outputs = Outputs(html, json_to, figure, overwrite=overwrite, page_package="matplotlib")
    outputs.check(settings.model, settings.text)
    with progress_bars(first="loading the libraries") as progress:
        from tieline.lab.on_model.design import design as run
        from tieline.lab.on_model.design import list_presets

        advice = None if settings.preset == "list" else run(settings=settings, progress=progress)
    if advice is None:
        print("\n".join(list_presets()))
    else:
        deliver(advice, outputs)
