"""Three tasks of GLUE from tab-separated files: CoLA, MRPC and RTE.

    task    columns of a line                                 label
    CoLA    source, label, mark, sentence (no header)         1 acceptable
    MRPC    label, id, id, sentence, sentence                 1 paraphrase
    RTE     index, sentence, sentence, label                  1 not_entailment

The test splits of GLUE have no labels and are not read. The files are a matter of their own terms
of use, so Tieline neither ships nor fetches them.

BERT for sentences and pairs of them, with one feed-forward network turned into a mixture.

Paper 1, Table 2: BERT-large, one network of 24 replaced by 16 experts, top 2 or 4. The small form
has the same parts at random weights: it shows that everything runs, and no more.

GLUE as a task of the engine: sentences to tokens, and the scores that the paper reports.

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
from transformers import BertConfig, BertForSequenceClassification

from tieline.core.errors import require
from tieline.training.config import GateConfig, ModelConfig, TrainConfig
from tieline.training.fetch import (
    DataError,
    check_file,
    fetch_checkpoint,
    local_checkpoint,
    shared_folder,
)
from tieline.training.image_models import route_networks_
from tieline.training.text_data import bpe_tokenizer

__all__ = [
    "TASKS",
    "SentenceConfig",
    "SentenceData",
    "SentenceItems",
    "SentenceTask",
    "Sentences",
    "Task",
    "answer_scores",
    "load_glue",
    "sentence_model",
]

LARGEST = 1 << 28


@dataclass(frozen=True)
class Task:
    """How a task's files are read.

    Attributes:
        columns: number of columns of a line.
        header: whether the first line names them.
        texts: columns of the sentences.
        label: column of the label.
        labels: its words, in the order of the numbers that they become.
        metric: what the paper reports for it.
        files: size and SHA-256 of the known splits.
    """

    columns: int
    header: bool
    texts: tuple[int, ...]
    label: int
    labels: tuple[str, ...]
    metric: str
    files: dict[str, tuple[int, str]]


TASKS: dict[str, Task] = {
    "CoLA": Task(
        columns=4,
        header=False,
        texts=(3,),
        label=1,
        labels=("0", "1"),
        metric="Matthews correlation",
        files={
            "train": (428_590, "cb368ebeb9f27d7ad03720d27ddc95687a311bdb100781a2fe59a5f5b1bc0624"),
            "dev": (53_717, "8c013e21dc39957cac37378d87bebe225b694a0d5fe13eded66c2856628833fd"),
        },
    ),
    "MRPC": Task(
        columns=5,
        header=True,
        texts=(3, 4),
        label=0,
        labels=("0", "1"),
        metric="accuracy and F1",
        files={
            "train": (941_277, "f178bcc72ab4c2c1c778b480912e0c8e1dba3ead150dc1d490d70682ab888c1e"),
            "dev": (105_616, "9e8f284788040f7c9ecde2e1b3c07237c756f926bd9ef8548ef5d34b56f69f17"),
        },
    ),
    "RTE": Task(
        columns=4,
        header=True,
        texts=(1, 2),
        label=3,
        labels=("entailment", "not_entailment"),
        metric="accuracy",
        files={
            "train": (846_226, "41e3a9b063433392343fad9e962cf2f58b681c78d8f71592f4186f0837246c5c"),
            "dev": (90_343, "80230dfa1347282e7b532b06a1004a76a710087541189bf874223ddf0e3819fb"),
        },
    ),
}


@dataclass(frozen=True)
class Sentences:
    """Sentences, or pairs of them, with their labels.

    Attributes:
        texts: one or two sentences for each example.
        labels: 0 or 1 for each example.
        source: task and split.
    """

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[int, ...]
    source: str

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def majority(self) -> float:
        """Share of the larger class: the accuracy of always saying the same."""
        ones = sum(self.labels) / len(self.labels)
        return max(ones, 1 - ones)


def load_glue(
    task: str, split: str, folder: Path | None = None, *, known: bool = True
) -> Sentences:
    """A split of a task.

    Args:
        task: a key of `TASKS`.
        split: train or dev.
        folder: holds CoLA/, MRPC/ and RTE/; by default `glue` in the folder of data sets.
        known: whether the file must be the one whose hash is stored here.
    """
    require(task in TASKS, f"the tasks are {', '.join(TASKS)}, got {task!r}")
    rules = TASKS[task]
    require(split in rules.files, f"the splits are {', '.join(rules.files)}, got {split!r}")
    path = (shared_folder("glue") if folder is None else folder) / task / f"{split}.tsv"
    require(
        path.is_file(),
        f"GLUE is not at {path}: it cannot be fetched; get {task} from gluebenchmark.com and put "
        "its files there",
        DataError,
    )
    if known:
        n_bytes, sha256 = rules.files[split]
        check_file(path, sha256, n_bytes)
    return _read(path, rules, f"{task} {split}")


def _read(path: Path, rules: Task, source: str) -> Sentences:
    size = path.stat().st_size
    require(size <= LARGEST, f"{path} has {size} bytes, at most {LARGEST} are read", DataError)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is no UTF-8 text: {problem}") from problem
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    rows = [line.split("\t") for line in lines[rules.header :]]
    require(len(rows) > 0, f"{path} has no example", DataError)
    for at, row in enumerate(rows, start=1 + rules.header):
        right = len(row) == rules.columns and row[rules.label] in rules.labels
        require(right, f"{path}, line {at}: not a line of {source}: {row!r:.80}", DataError)
    texts = tuple(tuple(row[column] for column in rules.texts) for row in rows)
    labels = tuple(rules.labels.index(row[rules.label]) for row in rows)
    return Sentences(texts, labels, source)


@dataclass(frozen=True, kw_only=True)
class SentenceConfig(ModelConfig):
    """Shape of the model.

    Attributes:
        layers: blocks.
        d_model: width.
        d_hidden: width of a network and of an expert.
        heads: attention heads.
        vocabulary: number of tokens; the last three are [CLS], [SEP] and padding where the
            vocabulary is learnt from the task's sentences.
        context: tokens of an example at most.
        routed: the block whose network is replaced, counted from 0.
        n_experts: experts of it.
        pretrained: name on the hub or folder of the weights to start from; None for random ones.
    """

    layers: int
    d_model: int
    d_hidden: int
    heads: int
    vocabulary: int
    context: int
    routed: int
    n_experts: int = 16
    pretrained: str | None = None

    def __post_init__(self) -> None:
        require(0 <= self.routed < self.layers, f"block {self.routed} of only {self.layers}")


def sentence_model(shape: SentenceConfig, gate: GateConfig) -> BertForSequenceClassification:
    """The model at its start, pretrained where the weights are here."""
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.d_model,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.d_hidden,
        max_position_embeddings=max(512, shape.context),
    )
    place = None if shape.pretrained is None else local_checkpoint(shape.pretrained)
    if place is None:
        model = BertForSequenceClassification(config)
    else:
        model = BertForSequenceClassification.from_pretrained(place)
    route_networks_(model, [shape.routed], gate, shape.n_experts)
    return model


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
