"""GLUE as a task of the engine: sentences to tokens, and the scores that the paper reports.

accuracy    share of right answers, beside that of always saying the same
f1          of class 1
mcc         Matthews correlation, 0 for guessing
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from tieline.errors import require
from tieline.training.config import TrainConfig
from tieline.training.data_glue import Sentences, load_glue
from tieline.training.pretrained import fetch_checkpoint
from tieline.training.sentence_models import SentenceConfig, sentence_model
from tieline.training.tasks import register_task
from tieline.training.vocabularies import bpe_tokenizer

__all__ = ["SENTENCES", "SentenceData", "SentenceItems", "SentenceTask", "answer_scores"]

SENTENCES = "sentences"
ROWS = 64


@dataclass(frozen=True, eq=False)
class SentenceItems(Dataset[dict[str, Tensor]]):
    """Examples as tensors of one length, in the order in which they are used."""

    tokens: Tensor
    segments: Tensor
    used: Tensor
    labels: Tensor
    order: Tensor

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        """What the model takes for one example."""
        place = self.order[at]
        return {
            "input_ids": self.tokens[place],
            "token_type_ids": self.segments[place],
            "attention_mask": self.used[place],
            "labels": self.labels[place],
        }


@dataclass(frozen=True, eq=False)
class SentenceData:
    """Examples to train on, and those to score on."""

    train: SentenceItems
    about: str
    dev: SentenceItems
    majority: float


class SentenceTask:
    """The task "sentences"."""

    def data(self, config: TrainConfig) -> SentenceData:
        """A task of GLUE; the pretrained weights are fetched here too, before anything is built."""
        shape, options = _shape(config), config.data.options
        folder = options.get("folder")
        train, dev = (
            load_glue(options["task"], split, None if folder is None else Path(folder))
            for split in ("train", "dev")
        )
        encode = _encoder(shape, train)
        n = config.optim.steps * config.optim.batch
        draw = torch.Generator().manual_seed(config.seed)
        order = torch.cat(
            [torch.randperm(len(train), generator=draw) for _ in range(-(-n // len(train)))]
        )
        about = f"{train.source}, {len(train)} examples, scored on {len(dev)}"
        scored_on = _items(dev, encode, torch.arange(len(dev)))
        return SentenceData(_items(train, encode, order[:n]), about, scored_on, dev.majority)

    def model(self, config: TrainConfig) -> nn.Module:
        """A fresh model."""
        return sentence_model(_shape(config), config.gate)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, data: SentenceData, config: TrainConfig) -> dict[str, Any]:
        """The scores on the development split."""
        model.eval()
        said = []
        for rows in torch.arange(len(data.dev)).split(ROWS):
            items = [data.dev[int(row)] for row in rows]
            inputs = {k: torch.stack([item[k] for item in items]) for k in items[0]}
            said.append(model(**inputs).logits.argmax(dim=-1))
        scores = answer_scores(torch.cat(said), data.dev.labels[data.dev.order])
        return {"dev": scores | {"majority": data.majority, "examples": len(data.dev)}}

    def save(self, model: nn.Module, data: SentenceData, folder: Path) -> None:
        """Weights in one file; the configuration of the run tells the shape."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, folder / "model.safetensors")


def answer_scores(said: Tensor, truth: Tensor) -> dict[str, float]:
    """Accuracy, F1 of class 1 and Matthews correlation (0 where one class is never said)."""
    both, only_said = ((said == 1) & (truth == 1)).sum(), ((said == 1) & (truth == 0)).sum()
    missed, neither = ((said == 0) & (truth == 1)).sum(), ((said == 0) & (truth == 0)).sum()
    tp, fp, fn, tn = (float(count) for count in (both, only_said, missed, neither))
    size = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    return {
        "accuracy": (tp + tn) / len(truth),
        "f1": 2 * tp / max(1.0, 2 * tp + fp + fn),
        "mcc": 0.0 if size == 0 else (tp * tn - fp * fn) / size,
    }


def _shape(config: TrainConfig) -> SentenceConfig:
    shape = config.model
    require(isinstance(shape, SentenceConfig), f"{type(shape).__name__} is no shape for sentences")
    assert isinstance(shape, SentenceConfig)
    return shape


Encode = Callable[[Sentences], list[tuple[list[int], list[int], list[int]]]]


def _encoder(shape: SentenceConfig, train: Sentences) -> Encode:
    """A function from examples to their tokens, segments and marks of use, all of one length."""
    if shape.pretrained is not None:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(fetch_checkpoint(shape.pretrained))
        marks = (found.cls_token_id, found.sep_token_id, found.pad_token_id)
    else:
        found = bpe_tokenizer(_flat(train), shape.vocabulary - 3)
        marks = (shape.vocabulary - 3, shape.vocabulary - 2, shape.vocabulary - 1)

    def encode(sentences: Sentences) -> list[tuple[list[int], list[int], list[int]]]:
        ids = iter(found(_flat(sentences), add_special_tokens=False)["input_ids"])
        parts = [[next(ids) for _ in texts] for texts in sentences.texts]
        return [packed(part, marks, shape.context) for part in parts]

    return encode


def _flat(sentences: Sentences) -> list[str]:
    return [text for texts in sentences.texts for text in texts]


def packed(
    parts: list[list[int]], marks: tuple[int, int, int], length: int
) -> tuple[list[int], list[int], list[int]]:
    """[CLS] a [SEP] b [SEP] and padding; the longer sentence is cut first.

    Returns tokens, segment of each token, and whether it is no padding.
    """
    cls, sep, pad = marks
    kept = [list(part) for part in parts]
    while sum(map(len, kept)) + 1 + len(kept) > length:
        max(kept, key=len).pop()
    tokens, segments = [cls], [0]
    for number, part in enumerate(kept):
        tokens += [*part, sep]
        segments += [number] * (len(part) + 1)
    rest = length - len(tokens)
    return tokens + [pad] * rest, segments + [0] * rest, [1] * len(tokens) + [0] * rest


def _items(sentences: Sentences, encode: Encode, order: Tensor) -> SentenceItems:
    columns = zip(*encode(sentences), strict=True)
    tokens, segments, used = (torch.tensor(column) for column in columns)
    return SentenceItems(tokens, segments, used, torch.tensor(sentences.labels), order)


register_task(SENTENCES, SentenceTask())
