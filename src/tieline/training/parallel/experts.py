"""Experts of one layer, spread over the ranks of a row of the grid."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from tieline.routing.dispatch import dispatch
from tieline.routing.experts import Experts
from tieline.training.parallel.exchange import spread_dispatch

__all__ = ["STACKS", "SpreadExperts"]

STACKS = ("w_in", "w_out", "b_in", "b_out")


class SpreadExperts(Experts):
    """The same function as `Experts`, each rank holding ⌈E / ranks⌉ experts or what is left.

    The parameters keep their names and are `DTensor`s, cut along the experts: they know their ranks
    and their whole shape, so the module holds nothing else.

    Args:
        experts: what to spread; equal on all ranks.
        mesh: the ranks, in one dimension.
    """

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.n_experts, self.d_model = experts.n_experts, experts.d_model
        self.d_hidden, self.activation = experts.d_hidden, experts.activation
        for name in STACKS:
            setattr(self, name, _spread(getattr(experts, name), mesh))

    def forward(
        self, x: Float[Tensor, "tokens width"], weights: Float[Tensor, "tokens experts"]
    ) -> Float[Tensor, "tokens width"]:
        """Σ_e w_te f_e(x_t) of this rank's tokens; every rank of the row must call it."""
        y = spread_dispatch(x, weights, self._own, _dtensor(self.w_in).device_mesh.get_group())
        if self.b_out is None:
            return y
        # whole on every rank: it acts on zero weights too, whose tokens are not sent
        bias = _dtensor(self.b_out).full_tensor(grad_placements=[Partial()])
        return y + weights.to(y) @ bias.to(y)

    def _own(self, x: Tensor, weights: Tensor) -> Tensor:
        w_in, w_out, b_in = (
            None if w is None else _dtensor(w).to_local()
            for w in (self.w_in, self.w_out, self.b_in)
        )
        assert w_in is not None
        assert w_out is not None
        if len(w_in) == 0:  # no expert, hence no token; sums of nothing keep every gradient alive,
            # for the other ranks wait for this one in the backward pass too
            return x + sum(w.sum() for w in (weights, w_in, w_out, b_in) if w is not None)
        own = weights[:, : len(w_in)]
        return dispatch(x, own, w_in, w_out, b_in, activation=self.activation)


def _spread(stack: nn.Parameter | None, mesh: DeviceMesh) -> nn.Parameter | None:
    if stack is None:
        return None
    # every rank has the whole stack already, so nothing needs to be sent
    shard = distribute_tensor(stack.detach(), mesh, [Shard(0)], src_data_rank=None)
    return nn.Parameter(shard, requires_grad=stack.requires_grad)


def _dtensor(value: Tensor) -> DTensor:
    assert isinstance(value, DTensor)
    return value
