"""Small audits and texts that several tests use."""

from functools import cache

import torch

from tests.models.tiny import VOCABULARY, lively, tiny_model
from tieline.analysis.audit import audit
from tieline.models.demo import demo_text
from tieline.models.model import Model
from tieline.run.condition import Perturbation

FAMILIES = ["mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v3"]


class Letters:
    """A tokenizer of single characters, for models that have none."""

    is_fast = False

    def __call__(self, text, add_special_tokens=True, **options):
        return {"input_ids": [3 + ord(letter) % (VOCABULARY - 3) for letter in text]}

    def decode(self, ids):
        return "".join(chr(97 + i % 26) for i in ids)


def random_text(count: int) -> str:
    """Random characters, the same on every call."""
    generator = torch.Generator().manual_seed(5)
    return "".join(chr(33 + int(i)) for i in torch.randint(0, 61, (count,), generator=generator))


@cache
def demo():
    return Model.open(dtype="fp32")


@cache
def small_audit():
    """An audit of the demo model on a short text, with a perturbation of every kind."""
    loaded, rows = demo(), some_perturbations()
    return audit(
        (loaded.module, loaded.tokenizer),
        text=demo_text(),
        tokens=576,
        sequence_length=96,
        batch_size=3,
        perturbations=rows,
        seed=3,
    )


def some_perturbations():
    return [
        Perturbation("rounding", "bf16"),
        Perturbation("rounding", "int4"),
        Perturbation("score noise", 0.02),
        Perturbation("score noise", 0.1),
        Perturbation("state noise", 0.01),
        Perturbation("rounding", "int4", "model"),
        Perturbation("state noise", 0.01, "model"),
    ]


def family_audit(family: str, perturbations, tokens: int = 240):
    model = lively(tiny_model(family))
    return audit(
        (model, Letters()),
        text=random_text(tokens),
        tokens=tokens,
        sequence_length=40,
        batch_size=4,
        perturbations=perturbations,
        remedies=[],
    )
