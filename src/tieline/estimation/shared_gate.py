"""One gate, several outputs: a mixture of experts as a regression function for the solvers.

    f_c(x) = Σ_i G_i(x) h(x, η_ic),   c = 1, ..., C

Outputs share the gate and have experts of their own. A parameter vector is
[router rows, biases, expert rows of output 1, ..., expert rows of output C]; for C = 1 that is the
vector of `MoEModel`. An output alone is a model of one output, which is how both value and Jacobian
are computed.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters

__all__ = ["SharedGate"]

Theta = Float[Tensor, "problems p"]
Inputs = Float[Tensor, "problems n d"]


@dataclass(frozen=True)
class SharedGate:
    """The regression function of a model with C outputs.

    Attributes:
        model: gate, link and experts of one output.
        outputs: C.
    """

    model: MoEModel
    outputs: int = 1

    @property
    def gate_size(self) -> int:
        """Parameters of the gate."""
        return self.model.n_experts * (self.model.router_width + 1)

    @property
    def size(self) -> int:
        """Length p of a parameter vector."""
        return self.gate_size + self.outputs * self.model.n_experts * self.model.expert_width

    def parameters(self, theta: Theta) -> MoEParameters:
        """Parameters of every output, (problems, C, ...); the gate is the same in all of them."""
        gate, experts = theta[:, None, : self.gate_size], theta[:, self.gate_size :]
        rows = experts.unflatten(1, (self.outputs, -1))
        return self.model.unflatten(torch.cat([gate.expand(-1, self.outputs, -1), rows], dim=2))

    def value(self, theta: Theta, x: Inputs) -> Float[Tensor, "problems n outputs"]:
        """F of every problem, input and output."""
        return self.model.regression(self.parameters(theta), self._repeated(x)).mT

    def value_and_jacobian(
        self, theta: Theta, x: Inputs
    ) -> tuple[Float[Tensor, "problems n outputs"], Float[Tensor, "problems n outputs p"]]:
        """F and its Jacobian; an output does not depend on the experts of the others."""
        value, jacobian = self.model.value_and_jacobian(self.parameters(theta), self._repeated(x))
        if self.outputs == 1:
            return value.mT, jacobian.transpose(1, 2)
        whole = theta.new_zeros(len(theta), x.shape[1], self.outputs, self.size)
        width = (self.size - self.gate_size) // self.outputs
        for place in range(self.outputs):
            first = self.gate_size + place * width
            whole[:, :, place, : self.gate_size] = jacobian[:, place, :, : self.gate_size]
            whole[:, :, place, first : first + width] = jacobian[:, place, :, self.gate_size :]
        return value.mT, whole

    def _repeated(self, x: Inputs) -> Float[Tensor, "problems outputs n d"]:
        """The inputs once for every output."""
        return x.unsqueeze(1).expand(-1, self.outputs, -1, -1)
