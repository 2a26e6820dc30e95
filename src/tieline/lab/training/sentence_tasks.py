"""GLUE: three sentence tasks, by BERT with one network replaced by a mixture of experts.

    task    columns of a line                                 label
    CoLA    source, label, mark, sentence (no header)         1 acceptable
    MRPC    label, id, id, sentence, sentence                 1 paraphrase
    RTE     index, sentence, sentence, label                  1 not_entailment

The test splits of GLUE have no labels and are not read. The files have their own terms of use, so
Tieline neither ships nor fetches them.

The model is that of paper 1, Table 2: BERT-large, one network of 24 replaced by 16 experts, top 2
or 4. The small form has the same parts with random weights and only tests that everything runs. The
scores are those that the paper reports:

    accuracy    share of right answers, beside that of a constant answer (`majority`)
    f1          of class 1
    mcc         Matthews correlation, 0 for guessing
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from tieline.core.errors import require
from tieline.core.files import whole_folder
from tieline.lab.training.checkpoint import save_weights
from tieline.lab.training.config import GateConfig, SentenceConfig, TrainConfig
from tieline.lab.training.data_files import (
    DataError,
    DataFile,
    check_file,
    data_set,
    fetch_checkpoint,
    local_checkpoint,
)
from tieline.lab.training.routed_networks import route_networks_
from tieline.lab.training.text_data import bpe_tokenizer

MAX_FILE_BYTES = 1 << 28


@dataclass(frozen=True)
class GlueTask:
    """Format of the files of one GLUE task."""

    columns: int  # number of columns of a line
    header: bool  # whether the first line names the columns
    texts: tuple[int, ...]  # columns of the sentences
    label: int  # column of the label
    labels: tuple[str, ...]  # text of class 0, then of class 1
    metric: str  # the score that the paper reports
    files: dict[str, DataFile]  # the known files of the splits


def _split_files(task: str, **splits: tuple[str, int]) -> dict[str, DataFile]:
    """Return the file of each split of a task, from its hash and size."""
    return {
        split: DataFile(f"{task}/{split}.tsv", *hash_and_size)
        for split, hash_and_size in splits.items()
    }


GLUE: dict[str, GlueTask] = {
    "CoLA": GlueTask(
        columns=4,
        header=False,
        texts=(3,),
        label=1,
        labels=("0", "1"),
        metric="Matthews correlation",
        files=_split_files(
            "CoLA",
            train=("cb368ebeb9f27d7ad03720d27ddc95687a311bdb100781a2fe59a5f5b1bc0624", 428_590),
            dev=("8c013e21dc39957cac37378d87bebe225b694a0d5fe13eded66c2856628833fd", 53_717),
        ),
    ),
    "MRPC": GlueTask(
        columns=5,
        header=True,
        texts=(3, 4),
        label=0,
        labels=("0", "1"),
        metric="accuracy and F1",
        files=_split_files(
            "MRPC",
            train=("f178bcc72ab4c2c1c778b480912e0c8e1dba3ead150dc1d490d70682ab888c1e", 941_277),
            dev=("9e8f284788040f7c9ecde2e1b3c07237c756f926bd9ef8548ef5d34b56f69f17", 105_616),
        ),
    ),
    "RTE": GlueTask(
        columns=4,
        header=True,
        texts=(1, 2),
        label=3,
        labels=("entailment", "not_entailment"),
        metric="accuracy",
        files=_split_files(
            "RTE",
            train=("41e3a9b063433392343fad9e962cf2f58b681c78d8f71592f4186f0837246c5c", 846_226),
            dev=("80230dfa1347282e7b532b06a1004a76a710087541189bf874223ddf0e3819fb", 90_343),
        ),
    ),
}


@dataclass(frozen=True)
class Sentences:
    """Sentences, or pairs of sentences, with their labels."""

    texts: tuple[tuple[str, ...], ...]  # one or two sentences for each example
    labels: tuple[int, ...]  # 0 or 1 for each example
    source: str  # task and split

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def majority(self) -> float:
        """Share of the larger class: the accuracy of a constant answer."""
        ones = sum(self.labels) / len(self.labels)
        return max(ones, 1 - ones)


def load_glue(
    task: str, split: str, folder: Path | None = None, *, check_hash: bool = True
) -> Sentences:
    """Load a split of a task.

    Args:
        task: a key of `GLUE`.
        split: train or dev.
        folder: holds CoLA/, MRPC/ and RTE/; by default `glue` in the folder of data sets.
        check_hash: require the file to have the hash in `GLUE`.
    """
    require(task in GLUE, f"the tasks are {', '.join(GLUE)}, got {task!r}")
    rules = GLUE[task]
    require(split in rules.files, f"the splits are {', '.join(rules.files)}, got {split!r}")
    file = rules.files[split]
    path = (data_set("glue") if folder is None else folder) / file.name
    require(
        path.is_file(),
        f"GLUE is not at {path}: it cannot be fetched; get {task} from gluebenchmark.com and put "
        "its files there",
        DataError,
    )
    if check_hash:
        check_file(path, file)
    return _read_glue_split(path, rules, f"{task} {split}")


def _read_glue_split(path: Path, rules: GlueTask, source: str) -> Sentences:
    """Read the examples of one TSV file of a task; raises on a line of another form."""
    size = path.stat().st_size
    require(
        size <= MAX_FILE_BYTES,
        f"{path} has {size} bytes, at most {MAX_FILE_BYTES} are read",
        DataError,
    )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is no UTF-8 text: {problem}") from problem
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    rows = [line.split("\t") for line in lines[rules.header :]]
    require(len(rows) > 0, f"{path} has no example", DataError)
    for line_number, row in enumerate(rows, start=1 + rules.header):
        fits = len(row) == rules.columns and row[rules.label] in rules.labels
        require(
            fits,
            f"{path}, line {line_number}: not a line of {source}: {row!r:.80}",
            DataError,
        )
    texts = tuple(tuple(row[column] for column in rules.texts) for row in rows)
    labels = tuple(rules.labels.index(row[rules.label]) for row in rows)
    return Sentences(texts, labels, source)


def sentence_model(shape: SentenceConfig, gate: GateConfig) -> BertForSequenceClassification:
    """Build the model, from pretrained weights if they are on this machine."""
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.d_model,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.d_hidden,
        max_position_embeddings=max(512, shape.context),
    )
    folder = None if shape.pretrained is None else local_checkpoint(shape.pretrained)
    if folder is None:
        model = BertForSequenceClassification(config)
    else:
        model = BertForSequenceClassification.from_pretrained(folder)
    route_networks_(model, [shape.routed], gate, shape.n_experts)
    return model


SCORED_ROWS = 64


@dataclass(frozen=True, eq=False)
class SentenceItems(Dataset[dict[str, Tensor]]):
    """Examples as padded tensors, in training or scoring order."""

    tokens: Tensor
    segments: Tensor
    used: Tensor
    labels: Tensor
    order: Tensor

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        """Return the model's inputs of one example."""
        index = self.order[position]
        return {
            "input_ids": self.tokens[index],
            "token_type_ids": self.segments[index],
            "attention_mask": self.used[index],
            "labels": self.labels[index],
        }


@dataclass(frozen=True, eq=False)
class SentenceData:
    """Examples for training and for scoring, a description, and the share of the larger class."""

    train: SentenceItems
    about: str
    dev: SentenceItems
    majority: float


class SentenceTask:
    """The task "sentences"."""

    def data(self, config: TrainConfig) -> SentenceData:
        """Load a task of GLUE, and fetch the pretrained weights before a model is built."""
        shape, options = config.shape(SentenceConfig, "sentences"), config.data.options
        folder = options.get("folder")
        train, dev = (
            load_glue(options["task"], split, None if folder is None else Path(folder))
            for split in ("train", "dev")
        )
        encode = _sentence_encoder(shape, train)
        n = config.optim.steps * config.optim.batch
        draw = torch.Generator().manual_seed(config.seed)
        order = torch.cat(
            [torch.randperm(len(train), generator=draw) for _ in range(-(-n // len(train)))]
        )
        about = f"{train.source}, {len(train)} examples, scored on {len(dev)}"
        scored_on = _sentence_items(dev, encode, torch.arange(len(dev)))
        return SentenceData(
            _sentence_items(train, encode, order[:n]), about, scored_on, dev.majority
        )

    def model(self, config: TrainConfig) -> nn.Module:
        """Build a new model."""
        return sentence_model(config.shape(SentenceConfig, "sentences"), config.gate)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, data: SentenceData, config: TrainConfig) -> dict[str, Any]:
        """Score the development split."""
        model.eval()
        answers = []
        for rows in torch.arange(len(data.dev)).split(SCORED_ROWS):
            items = [data.dev[int(row)] for row in rows]
            inputs = {k: torch.stack([item[k] for item in items]) for k in items[0]}
            answers.append(model(**inputs).logits.argmax(dim=-1))
        scores = answer_scores(torch.cat(answers), data.dev.labels[data.dev.order])
        return {"dev": scores | {"majority": data.majority, "examples": len(data.dev)}}

    def save(self, model: nn.Module, data: SentenceData, folder: Path) -> None:
        """Write the weights to one file; the run's configuration holds the shape."""
        with whole_folder(folder, replace=True) as half:
            save_weights(model, half)


def answer_scores(answers: Tensor, truth: Tensor) -> dict[str, float]:
    """Return accuracy, F1 of class 1 and Matthews correlation (0 for constant answers)."""
    tp, fp, fn, tn = (
        float(((answers == answer) & (truth == label)).sum())
        for answer, label in ((1, 1), (1, 0), (0, 1), (0, 0))
    )
    size = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    return {
        "accuracy": (tp + tn) / len(truth),
        "f1": 2 * tp / max(1.0, 2 * tp + fp + fn),
        "mcc": 0.0 if size == 0 else (tp * tn - fp * fn) / size,
    }


Encode = Callable[[Sentences], list[tuple[list[int], list[int], list[int]]]]


def _sentence_encoder(shape: SentenceConfig, train: Sentences) -> Encode:
    """Return a function from examples to tokens, segments and masks, all of one length."""
    if shape.pretrained is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(fetch_checkpoint(shape.pretrained))
        marks = (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id)
    else:
        tokenizer = bpe_tokenizer(_sentence_texts(train), shape.vocabulary - 3)
        marks = (shape.vocabulary - 3, shape.vocabulary - 2, shape.vocabulary - 1)

    def encoded_sentences(sentences: Sentences) -> list[tuple[list[int], list[int], list[int]]]:
        ids = iter(tokenizer(_sentence_texts(sentences), add_special_tokens=False)["input_ids"])
        token_ids = [[next(ids) for _ in texts] for texts in sentences.texts]
        return [
            pack_sentences(ids_of_example, marks, shape.context) for ids_of_example in token_ids
        ]

    return encoded_sentences


def _sentence_texts(sentences: Sentences) -> list[str]:
    """Return all sentences of all examples in one list."""
    return [text for texts in sentences.texts for text in texts]


def pack_sentences(
    sentences: list[list[int]], marks: tuple[int, int, int], length: int
) -> tuple[list[int], list[int], list[int]]:
    """Pack [CLS] a [SEP] b [SEP] and padding; the longer sentence is cut first.

    Returns tokens, segment of each token, and 1 for tokens or 0 for padding.
    """
    cls, sep, pad = marks
    shortened = [list(sentence) for sentence in sentences]
    while sum(map(len, shortened)) + 1 + len(shortened) > length:
        max(shortened, key=len).pop()
    tokens, segments = [cls], [0]
    for number, sentence in enumerate(shortened):
        tokens += [*sentence, sep]
        segments += [number] * (len(sentence) + 1)
    padding = length - len(tokens)
    return tokens + [pad] * padding, segments + [0] * padding, [1] * len(tokens) + [0] * padding


def _sentence_items(sentences: Sentences, encode: Encode, order: Tensor) -> SentenceItems:
    """Return encoded sentences with labels, in the given order."""
    columns = zip(*encode(sentences), strict=True)
    tokens, segments, used = (torch.tensor(column) for column in columns)
    return SentenceItems(tokens, segments, used, torch.tensor(sentences.labels), order)
