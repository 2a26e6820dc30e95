"""Kill commands at random moments, let two write into one output, put something in their way.

    python -m tools.attack KILLS [RACES] [SEED] [COMMAND ...]        # so many of each command

kills       Half come at a random moment of the run, the others a few milliseconds after something
            was written. What is there must be absent or complete; a last run must succeed, and
            leave nothing hidden beside its output.
races       Two runs write into one new output at the same time: one does, the other says why it
            does not and leaves with 2. Commands that add to a file or folder of results both do.
intruders   Somebody makes the output at a random moment of a run: it stays as it is, and the run
            leaves with 2, unless it had ended before.

Nothing that a command says may call itself a bug. Commands run in forks of this process, which has
loaded the libraries: most of a run is then its work and its writing.
"""

import importlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from tieline import cli
from tieline.cli.app import app_with_commands
from tieline.cli.outputs import Outputs
from tieline.lab.estimation.rates import RateStore
from tieline.lab.training import language_tasks  # noqa: F401, registers the decoder that is trained
from tieline.lab.training.checkpoint import last_checkpoint
from tieline.models import load_pretrained
from tieline.trace import load_trace, save_trace
from tieline.trace.readers import import_trace

LONGEST = 600
REFUSALS = ("another process", "is not empty", "exists")
LIBRARIES = (
    "tieline.analysis.smooth",
    "tieline.lab.on_model.reroute",
    "tieline.engines.trace_sources",
)
LIBRARIES += (
    "tieline.lab.on_model.upcycle",
    "tieline.lab.claims",
    "tieline.lab.training.training_run",
)
LIBRARIES += ("tieline.analysis.route_files", "tieline.report", "tieline.lab.report", "plotly")


@dataclass
class Victim:
    """A command, what it makes, and how its completeness is checked.

    Attributes:
        arguments: of the command; `{out}` stands for the output.
        check: raises if the output is there and not complete.
        more: arguments of a run whose output is there already.
        resume: arguments of a run that goes on with what a killed one left.
        kind: what the output is; others may add to a "shared" one.
        seconds: how long an undisturbed run takes.
    """

    arguments: list[str]
    check: Callable[[Path], object]
    more: list[str] = field(default_factory=lambda: ["--overwrite"])
    resume: list[str] = field(default_factory=list)
    kind: Literal["file", "folder", "run", "shared"] = "folder"
    seconds: float = 0.0


def _run_is_complete(out: Path) -> None:
    """A training run: its JSON, its last checkpoint and its models are read."""
    for path in out.glob("*.json"):
        json.loads(path.read_bytes())
    last_checkpoint(out)
    if (out / "model").exists():
        AutoModelForCausalLM.from_pretrained(out / "model")
    if (out / "stock").exists():
        load_pretrained(out / "stock")


def _rows_are_complete(out: Path) -> None:
    """All lines but the last, which may be cut off and is then written again."""
    RateStore(out).load("x")


def _results_are_complete(out: Path) -> None:
    """Every kept result is JSON."""
    for path in out.glob("[!.]*.json"):
        json.loads(path.read_bytes())


def _json_is_complete(out: Path) -> None:
    """The file is JSON."""
    json.loads(out.read_bytes())


def _lines_are_complete(out: Path) -> None:
    """Every line is JSON."""
    for line in out.read_bytes().splitlines():
        json.loads(line)


def _page_is_complete(out: Path) -> None:
    """A page ends as HTML does."""
    assert out.read_text().rstrip().endswith("</html>")


def victims(folder: Path) -> dict[str, Victim]:
    """Every command that makes something."""
    make_inputs(folder)
    few = ["--tokens", "512", "--calibration", "512", "--rounds", "2", "--batch-size", "2"]
    fit = ["--tokens", "512", "--fit-tokens", "512", "--steps", "20"]
    grid = ["--gate", "linear", "--link", "softmax", "--expert", "linear", "--sizes", "500,1000"]
    rows = ["--repetitions", "40", "--results", "{out}"]
    claims = ["p1-corA.12", "p1-def3.1", "p1-lemA.16", "p1-propA.15", "p1-propA.9"]
    kept = ["--fast", "--results", "{out}"]
    part, routes, to = str(folder / "part"), str(folder / "routes.npy"), ["-o", "{out}"]
    design = ["design", "--preset", "olmoe"]
    captured = ["capture", "--engine", "transformers", "--tokens", "2048", *to]
    shared: dict[str, Any] = {"more": [], "kind": "shared"}
    return {
        "merge": Victim(["merge", part, part, "--renumber", *to], load_trace),
        "upcycle": Victim(["upcycle", str(folder / "dense"), *to], load_pretrained),
        "inspect": Victim(["inspect", "--tokens", "2048", "--save-trace", "{out}"], load_trace),
        "capture": Victim(captured, load_trace),
        "convert": Victim(["convert", routes, "{out}", "--to", "trace"], load_trace),
        "lines": Victim(
            ["convert", routes, "{out}", "--to", "vllm"], _lines_are_complete, kind="file"
        ),
        **{
            name: Victim(arguments, kind="file", check=check)
            for name, arguments, check in _reports(folder)
        },
        "json": Victim([*design, "--json={out}"], _json_is_complete, kind="file"),
        "page": Victim([*design, "--html={out}"], _page_is_complete, kind="file"),
        "rates": Victim(["rates", *grid, *rows], _rows_are_complete, **shared),
        "reproduce": Victim(["reproduce", *claims, *kept], _results_are_complete, **shared),
        "train": Victim(
            ["train", "demo-smoke-smooth1", *to], _run_is_complete, [], ["--resume"], kind="run"
        ),
        "smooth": Victim(["smooth", *few, *to], load_pretrained),
        "reroute": Victim(["reroute", *fit, *to], load_pretrained),
    }


def _reports(folder: Path) -> list[tuple[str, list[str], Callable[[Path], object]]]:
    """Name, arguments and check of commands that write a page, a figure or a result alone."""
    routes, few = str(folder / "few.npy"), ["--tokens", "256"]
    page, data = ["--html={out}"], ["--json={out}"]
    only = ["--formats", "bf16", "--flips", "50", "--remedies", "none"]
    return [
        ("inspect-page", ["inspect", *few, *page], _page_is_complete),
        ("inspect-json", ["inspect", *few, *data], _json_is_complete),
        ("diff", ["diff", routes, routes, *page], _page_is_complete),
        ("check", ["check", routes, *page], _page_is_complete),
        ("audit", ["audit", *few, *only, *data], _json_is_complete),
        ("walks", ["walks", *few, *data], _json_is_complete),
        ("soften", ["soften", *few, *page], _page_is_complete),
        ("slice", ["slice", *few, *page], _page_is_complete),
        ("attention", ["attention", *few, *data], _json_is_complete),
        ("frontier", ["frontier", *few, "--calibration", "256", *data], _json_is_complete),
    ]


def make_inputs(folder: Path) -> None:
    """Make a dense model, routes in a file and a trace."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(folder / "dense")
    experts = np.random.default_rng(0).integers(0, 8, (20_000, 4, 1))
    np.save(folder / "routes.npy", np.concatenate([experts, (experts + 1) % 8], 2))
    save_trace(import_trace(folder / "routes.npy"), folder / "part")
    np.save(folder / "few.npy", experts[:500])


class Run:
    """A command in a fork, in a session of its own, so that its workers can be killed with it."""

    def __init__(self, arguments: list[str]) -> None:
        """Start the command."""
        handle, self._errors = tempfile.mkstemp()
        self.checked = Path(f"{self._errors}.checked")  # there once the command has looked
        sys.stdout.flush()
        self.id, self.code = os.fork(), None
        if self.id == 0:
            _be_command(arguments, handle, self.checked)
        os.close(handle)

    def runs(self) -> bool:
        """Whether it has not ended."""
        if self.code is None:
            done, status = os.waitpid(self.id, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if done else None
        return self.code is None

    def replaces(self, out: Path) -> bool:
        """Whether a file was there when it looked at its outputs, so that it may replace it."""
        return self.checked.exists() and str(out) in self.checked.read_text().splitlines()

    def kill(self) -> None:
        """Kill it with its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.id, signal.SIGKILL)
        self.wait()

    def wait(self) -> str:
        """Wait until it has ended; returns what it said on stderr."""
        until = time.monotonic() + LONGEST
        while self.runs():
            if time.monotonic() > until:
                self.kill()
                raise AssertionError("a command does not end")
            time.sleep(0.002)
        message = Path(self._errors).read_text(errors="replace")
        assert "bug of tieline" not in message, message
        assert "Traceback" not in message, message
        return message


def _be_command(arguments: list[str], errors: int, checked: Path) -> None:
    """Become the command, which makes a file once it has looked at its outputs: never returns."""
    code, look = 70, Outputs.check_targets

    def check(outputs: Outputs, *inputs: object) -> None:
        look(outputs, *inputs)
        checked.write_text("\n".join(map(str, filter(outputs.may_replace, outputs.files))))

    try:
        torch.set_num_threads(1)  # here: the pool of threads of the parent does not outlive a fork
        setattr(Outputs, "check_targets", check)  # noqa: B010 - a method is replaced on purpose
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(errors, 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
        cli.main(arguments)
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def start_run(victim: Victim, out: Path, overwrite: bool = False) -> Run:
    """Start a command on its output; one that was killed is resumed."""
    arguments = [word.replace("{out}", str(out)) for word in victim.arguments]
    resumed = victim.resume if (out / "config.json").exists() and victim.resume else []
    return Run([*arguments, *resumed, *(victim.more if overwrite else [])])


def finish_run(victim: Victim, out: Path) -> float:
    """Let a run end; returns how long it took."""
    began, process = time.monotonic(), start_run(victim, out, out.exists())
    message = process.wait()
    assert process.code == 0, message
    victim.check(out)
    return time.monotonic() - began


def partial_paths(out: Path) -> list[Path]:
    """Names of halves beside and in an output."""
    return [*out.parent.glob(".*.partial"), *out.glob(".*.partial")]


def written_sizes(out: Path) -> set[tuple[str, int]]:
    """Hidden names and sizes of what a run writes."""
    sizes = set()
    for path in (out, *out.rglob("*"), *partial_paths(out)):
        with suppress(OSError):  # gone meanwhile
            sizes.add((str(path), path.stat().st_size))
    return sizes


def kill_run(victim: Victim, out: Path, draw: random.Random) -> tuple[bool, bool]:
    """Kill one run; returns whether it still ran, and whether it had begun to write."""
    before = written_sizes(out)
    process = start_run(victim, out, overwrite=True)
    until = time.monotonic() + victim.seconds * draw.random()
    wait_for_write = draw.random() < 0.5
    while process.runs():
        if written_sizes(out) - before if wait_for_write else time.monotonic() > until:
            break
        time.sleep(0.002)
    time.sleep(draw.random() * 0.02)
    ran, writing = process.runs(), bool(written_sizes(out) - before)
    process.kill() if ran else process.wait()
    return ran, ran and writing


def kill_repeatedly(
    name: str, victim: Victim, folder: Path, times: int, draw: random.Random
) -> int:
    """Kill a command several times, then let it finish; returns how often it had begun to write."""
    out, killed, wrote = folder / f"{name}-out", 0, 0
    while killed < times:
        ran, writing = kill_run(victim, out, draw)
        killed, wrote = killed + ran, wrote + writing
        if out.exists():
            victim.check(out)
        if not ran:  # it has ended: the next one begins anew
            out = folder / f"{name}-out-{killed}-{draw.random()}"
    finish_run(victim, out)
    check_nothing_hidden(name, out)
    return wrote


def check_nothing_hidden(name: str, out: Path) -> None:
    """Raise if a run has left a half."""
    assert not partial_paths(out), f"{name} left {partial_paths(out)}"


def race_two_runs(name: str, victim: Victim, out: Path, draw: random.Random) -> bool:
    """Let two runs write into one new output; returns whether neither had ended before the other.

    A run that looked when the file was there replaces it, as it may: that was no race.
    """
    first = start_run(victim, out)
    time.sleep(draw.random() * min(0.2, victim.seconds) * (draw.random() < 0.5))
    second = start_run(victim, out) if victim.kind != "run" else Run(arguments_of(victim, out))
    ends = [(process.wait(), process.code) for process in (first, second)]
    codes = sorted(str(code) for _, code in ends)
    is_race = not any(run.replaces(out) for run in (first, second))
    both = victim.kind == "shared" or not is_race
    assert codes == (["0", "0"] if both else ["0", "2"]), f"{name}: {ends}"
    for message, code in ends:
        refused = any(refusal in message for refusal in REFUSALS)
        assert code == 0 or (refused and f"wrote {out}" not in message), f"{name}: {message}"
    victim.check(out)
    check_nothing_hidden(name, out)
    return is_race


def arguments_of(victim: Victim, out: Path) -> list[str]:
    """The arguments of a command that begins anew."""
    return [word.replace("{out}", str(out)) for word in victim.arguments]


def intrude_on_run(name: str, victim: Victim, out: Path, draw: random.Random) -> bool:
    """Make the output during a run; returns whether that was before the run's own."""
    thesis = out.with_name(f"{out.name}-thesis")
    thesis.write_text("mine") if victim.kind == "file" else thesis.mkdir()
    if victim.kind != "file":
        (thesis / "thesis").write_text("mine")
    process = start_run(victim, out)
    while process.runs() and not process.checked.exists():  # files that are there are replaced
        time.sleep(0.002)
    time.sleep(victim.seconds * draw.random())
    try:
        os.link(thesis, out) if victim.kind == "file" else thesis.rename(out)
    except OSError:  # the run was faster
        assert process.wait() is not None
        assert process.code == 0, name
        return False
    message = process.wait()
    text = (out if victim.kind == "file" else out / "thesis").read_text()
    assert text == "mine", f"{name} replaced what somebody else had made"
    assert process.code == 2, f"{name} {process.code}: {message}"
    check_nothing_hidden(name, out)
    return True


def attack_all(name: str, victim: Victim, folder: Path, counts: tuple[int, int], seed: int) -> Any:
    """Run all attacks on a command; returns how many there were of each kind."""
    draw, (kills, races) = random.Random(f"{name} {seed}"), counts  # noqa: S311
    victim.seconds = finish_run(victim, folder / f"{name}-first")
    done = Counter(kills=kills, writing=kill_repeatedly(name, victim, folder, kills, draw))
    for number in count():
        if done["races"] >= races:
            return done
        done["races"] += race_two_runs(name, victim, folder / f"{name}-race-{number}", draw)
        if victim.kind in ("file", "folder"):
            done["intruders"] += intrude_on_run(
                name, victim, folder / f"{name}-taken-{number}", draw
            )
    return done


def main() -> None:
    """Attack every command and report."""
    logging.disable_progress_bar()
    for module in LIBRARIES:
        importlib.import_module(module)
    app_with_commands()
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    kills, races, seed = (*numbers, *(8, 4, 0)[len(numbers) :])
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as parent:
        commands = victims(Path(parent))
        for name in [word for word in sys.argv[1:] if not word.isdigit()] or commands:
            folder = Path(parent) / name
            folder.mkdir()
            done = attack_all(name, commands[name], folder, (kills, races), seed)
            total += done
            print(f"{name:12} {counts_text(done)}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{counts_text(total)}: nothing lost, nothing half, no run blocked")


def counts_text(counts: Counter[str]) -> str:
    """Counts as text, "8 kills"."""
    return (
        f"{counts['kills']} kills ({counts['writing']} after it began to write), "
        f"{counts['races']} races, {counts['intruders']} intruders"
    )


if __name__ == "__main__":
    main()
