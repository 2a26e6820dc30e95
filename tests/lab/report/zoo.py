"""Results of the laboratory to draw, on the routed model of the instrument's zoo."""

from tests.report.zoo import HOSTILE, make_trace
from tieline.core.statistics import Estimate
from tieline.lab.on_model.slice import RouterSlice, SlicePoint
from tieline.lab.on_model.soften import DecidingToken, Softening, SoftLayer, SoftLevel
from tieline.lab.on_model.walks import FlipWalk, FlipWalks, LayerWalk
from tieline.lab.tropical.plane_cells import slice_router
from tieline.measure.boundary import margin_tail
from tieline.measure.measure_settings import Measurement

TOKENS = ("a$b", "<b>", "\x00")


def make_softening():
    """Every layer with a prediction but the last."""
    trace = make_trace()
    levels = tuple(
        SoftLevel(
            0.01 * 2**i, Estimate(-1e-4 * 2**i, 5e-5), Estimate(-0.01, 5e-3), Estimate(0.001, 2e-3)
        )
        for i in range(3)
    )
    layers = []
    for index, layer in enumerate(trace.layers):
        last = index + 1 == len(trace.layers)
        token = DecidingToken(0, index, HOSTILE[index], layer.name, 1, 2, 0.003, -0.4)
        layers.append(
            SoftLayer(
                name=layer.name,
                form="projection",
                levels=levels,
                predicted=Estimate(None) if last else Estimate(-0.012, 4e-3),
                by_gradient=None if last else -0.02,
                density=Estimate(2.0, 0.1),
                tail=margin_tail(layer.gap),
                constant=None if last else 12.0,
                near=0 if last else 40,
                exact=0 if last else 20,
                deciding=() if last else (token,),
                half=0 if last else 5,
                status="not answerable: groups" if last else "ok",
            )
        )
    loss = Estimate(2.5, 0.1)
    slope = Estimate(-1e-4, 4e-5)
    sizes = (loss, 200, 10, 7.0, (), {"text": "a.txt"})
    return Softening("zoo/moe", tuple(layers), levels, slope, *sizes)


def make_walks():
    """Walks of every layer but the last, whose walls are not flat."""
    names = [layer.name for layer in make_trace().layers]
    walk = FlipWalk(
        times=(1.0, 16.0, 256.0),
        lower=(0.01, 0.1, 0.3),
        value=tuple(Estimate(share, 0.01) for share in (0.02, 0.12, 0.4)),
        upper=(0.03, 0.2, 0.7),
        median=420.0,
        tokens=48,
        directions=3.5,
    )
    curved = Measurement(None, "not answerable: experts are chosen within groups")
    layers = [LayerWalk(name, Measurement(walk)) for name in names[:-1]]
    return FlipWalks("zoo/moe", "bf16", (*layers, LayerWalk(names[-1], curved)), "ok", {"seed": 0})


def make_slice():
    """A slice of three experts through tokens whose texts try to break out."""
    weight = [[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]
    cut = slice_router([[2.0, 0.1], [0.3, 2.0], [-1.0, -2.0]], weight, None, 1, epsilon=0.1)
    points = tuple(SlicePoint(0, index, text, (index,)) for index, text in enumerate(TOKENS))
    checks = (1000, 998, 2)
    return RouterSlice("zoo/moe", "a.0.gate", points, "noise of bf16", cut, *checks, {"seed": 0})
