"""Three tasks of GLUE from tab-separated files: CoLA, MRPC and RTE.

    task    columns of a line                                 label
    CoLA    source, label, mark, sentence (no header)         1 acceptable
    MRPC    label, id, id, sentence, sentence                 1 paraphrase
    RTE     index, sentence, sentence, label                  1 not_entailment

The test splits of GLUE have no labels and are not read. The files are a matter of their own terms
of use, so Tieline neither ships nor fetches them.
"""

from dataclasses import dataclass
from pathlib import Path

from tieline.errors import require
from tieline.training.archives import check_file
from tieline.training.fetch import DataError, shared_folder

__all__ = ["TASKS", "Sentences", "Task", "load_glue"]

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
