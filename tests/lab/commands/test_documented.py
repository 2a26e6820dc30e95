"""What the ledger says about runs: commands that run, cases that are named, figures quoted."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from tieline.cli.app import app_with_commands
from tieline.lab.claims.claim import Verdict, all_claims
from tieline.lab.training.recipes import recipe_config
from tieline.lab.training.training_run import TASKS

DOCS = Path(__file__).parents[3] / "docs"
CASES = ("reproduced at small scale", "not at this scale", "needs accelerators")
TEXTS = {
    name: " ".join(
        (claim.statement, claim.tested, claim.condition, claim.untestable, claim.undecided)
    )
    for name, claim in all_claims().items()
}
COMMANDS = sorted({c for text in TEXTS.values() for c in re.findall(r"`(tieline [^`]+)`", text)})
"""Every command that the ledger names, as it stands there."""
WHOLE = [command for command in COMMANDS if command.split()[1] in ("train", "upcycle", "smooth")]
EXPERIMENTS = [
    name for name in all_claims() if re.fullmatch(r"p1-(table\d|fig[4567-]+)|p2-table[2-5]", name)
]


def parsed(command):
    """Name and values of a command, by the parser of the command line itself."""
    group = typer.main.get_command(app_with_commands())
    _, name, *arguments = shlex.split(command)
    subcommand = group.get_command(typer.Context(group), name)
    assert subcommand is not None, f"no command {name!r}"
    return name, subcommand.make_context(name, arguments).params


def test_the_ledger_names_commands():
    assert len(WHOLE) > 25
    for family in ("wikitext-paper", "enwik8-paper", "text8-paper", "glue-paper", "pacs-paper"):
        assert any(family in command for command in WHOLE), family


@pytest.mark.parametrize("command", WHOLE)
def test_a_command_of_the_ledger_is_one_that_the_command_line_takes(command):
    name, values = parsed(command)
    if name == "train":
        config = recipe_config(values["recipe"], values["seed"])
        assert config.recipe == values["recipe"]
        assert config.task in TASKS


def test_a_command_that_is_only_hinted_at_exists_with_its_options():
    group = typer.main.get_command(app_with_commands())
    for command in set(COMMANDS) - set(WHOLE):
        _, name, *arguments = shlex.split(command)
        subcommand = group.get_command(typer.Context(group), name)
        assert subcommand is not None, command
        options = {option for parameter in subcommand.params for option in parameter.opts}
        assert {word for word in arguments if word.startswith("--")} <= options


@pytest.mark.parametrize("command", [c for c in WHOLE if "demo" in c])
def test_a_command_with_its_data_here_says_what_it_would_do(command, tieline):
    code, out, err = tieline(*shlex.split(command)[1:], "--dry-run")
    assert code == 0, err
    assert "the text in the box" in out
    assert "s a step" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["wikitext-paper", "enwik8-paper", "text8-paper", "glue-paper", "pacs-paper"]
)
def test_the_papers_forms_say_what_they_would_do(
    family, tieline, tmp_path, monkeypatch, no_axis_checks
):
    def no_route(*args, **options):
        raise OSError("no route")

    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))  # tests download nothing
    monkeypatch.setattr("urllib.request.urlopen", no_route)
    monkeypatch.setattr("tieline.lab.training.data_files.snapshot_download", no_route)
    command = next(command for command in WHOLE if family in command)
    code, out, err = tieline(*shlex.split(command)[1:], "--dry-run")
    assert code == 0, err
    assert "parameters" in out
    assert "absent" in out or "s a step" in out


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_says_which_case_it_is(name):
    claim = all_claims()[name]
    if claim.expected in (Verdict.UNTESTABLE, Verdict.UNDECIDED):
        reason = claim.untestable or claim.undecided
        assert reason.startswith(CASES[1:]), reason
        assert "`tieline " in reason
    else:
        assert claim.tested.lower().startswith(CASES[0])
        assert "`tieline train" in claim.tested


def test_the_experiments_are_all_there():
    tables = [f"p1-table{n}" for n in (1, 2, 3, 4, 5, 6, 8)] + [f"p2-table{n}" for n in range(2, 6)]
    assert set(EXPERIMENTS) == {*tables, "p1-fig4", "p1-fig5", "p1-fig6-7"}


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "Measured: " in text])
def test_figures_that_were_measured_stand_in_the_page_that_is_named(name):
    measurements = re.findall(r"Measured: (.*?)\((docs/\w+\.md)\)", TEXTS[name])
    assert measurements, name
    for sentence, page in measurements:
        text = (DOCS.parent / page).read_text()
        figures = re.findall(r"[+−]?\d+[.,]\d+", sentence)
        assert figures
        missing = [figure for figure in figures if figure not in text]
        assert not missing, f"{page} does not have {missing}"


def test_every_page_that_the_ledger_names_is_there():
    pages = {page for text in TEXTS.values() for page in re.findall(r"docs/[\w-]+\.md", text)}
    assert {"docs/training.md", "docs/vision.md"} <= pages
    assert all((DOCS.parent / page).is_file() for page in pages)
