"""Random models and parameters for the tests of estimation."""

import itertools

import torch

from tieline.lab.estimation.model import GATES, LINKS, MoEModel

EXPERT_FORMS = (
    {"expert": "linear"},
    {"expert": "polynomial", "power": 3},
    {"expert": "relu"},
    {"expert": "gelu"},
    {"expert": "tanh"},
    {"expert": "two_layer", "activation": "tanh"},
)
MODELS = [
    MoEModel(gate=gate, link=link, d=2, n_experts=3, tau=(0.3, 0.2), **form)
    for gate, link, form in itertools.product(GATES, LINKS, EXPERT_FORMS)
]


def model_id(model):
    return f"{model.gate}-{model.link}-{model.expert}"


def random_parameters(model, *batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, model.n_parameters)
    return model.unflatten(torch.randn(shape, generator=generator, dtype=torch.float64))


def random_inputs(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1
