"""One law for all commands: a field of a settings class is an option and a keyword argument."""

import importlib
import inspect
import json
import re
from functools import cache
from typing import get_args

import pytest
import typer

from tests.settings import EXAMPLES, JOBS, RULES, SETTINGS
from tieline.cli.app import app_with_commands
from tieline.cli.options import option_names
from tieline.core.records import to_plain
from tieline.core.setting_fields import SettingError


@cache
def command(name):
    group = typer.main.get_command(app_with_commands())
    return group.get_command(typer.Context(group), name)


def job(settings):
    module, name = JOBS[settings]
    return getattr(importlib.import_module(module), name)


def command_name(settings):
    """The command whose options are the fields of a settings class."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", settings.__name__.removesuffix("Settings")).lower()


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda cls: cls.__name__)
def test_defaults_construct_and_are_json_and_every_field_has_help(settings):
    example = settings(**EXAMPLES.get(settings, {}))
    plain = to_plain(example)
    assert json.loads(json.dumps(plain)) == plain
    for name, described in settings.fields_by_name().items():
        assert described.help.rstrip(")").endswith("."), name
        assert described.options(name) or described.option is None


@pytest.mark.parametrize("settings", JOBS, ids=lambda cls: cls.__name__)
def test_typed_options_are_the_fields_and_the_signature_lists_them(settings):
    function, fields = job(settings), list(settings.fields_by_name())
    (typed,) = get_args(inspect.unwrap(function).__annotations__["options"])
    assert set(typed.__annotations__) == set(fields)
    listed = inspect.signature(function).parameters
    assert set(fields) <= set(listed)
    for name in fields:
        assert f"    {name}: " in function.__doc__


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda cls: cls.__name__)
def test_the_options_of_the_command_are_the_fields(settings):
    name = command_name(settings)
    options = {option for parameter in command(name).params for option in parameter.opts}
    options |= {option for parameter in command(name).params for option in parameter.secondary_opts}
    for field, described in settings.fields_by_name().items():
        for declared in described.options(field):
            assert set(declared.split("/")) <= options, field


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda cls: cls.__name__)
def test_the_short_form_is_the_settings_form(settings):
    example = EXAMPLES.get(settings, {})
    changed = {name: 1 for name in settings.fields_by_name() if name == "batch_size"} | example
    assert settings.of(None, changed) == settings(**changed)
    assert settings.of(settings(**example), changed) == settings(**changed)
    assert set(settings(**changed).changed()) >= set(changed) - {"to"}


@pytest.mark.parametrize(
    ("settings", "values", "typed", "message"),
    RULES,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_rule_is_refused_at_both_doors_by_its_own_name(settings, values, typed, message, tieline):
    with pytest.raises(SettingError) as refused:
        settings.of(None, {**EXAMPLES.get(settings, {}), **values})
    name = command_name(settings)
    python = str(refused.value)
    code, out, err = tieline(name, *typed)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert "--" not in python
    for field in values:
        option = max(settings.fields_by_name()[field].options(field), key=len).partition("/")[0]
        if option in err:
            assert field in python


def test_option_names_are_the_longest_before_a_slash():
    names = option_names(command("capture").callback)
    assert (names["out"], names["stream"], names["scores"]) == ("--out", "--stream", "--no-scores")
    assert names["debug"] == "--debug"


def every_option():
    """Command, option, its parameter's name and type, for all commands."""
    names = typer.main.get_command(app_with_commands()).list_commands(None)
    for name in names:
        for parameter in command(name).params:
            if parameter.param_type_name == "option":
                for option in parameter.opts:
                    yield name, option, parameter.name, parameter.type_descriptor.annotation


def test_an_option_is_the_same_thing_in_every_command():
    kinds, spellings = {}, {}
    for name, option, field, kind in every_option():
        kinds.setdefault(option, {}).setdefault(kind, []).append(name)
        spellings.setdefault((field, kind), {}).setdefault(name, set()).add(option)
    mixed = {option: commands for option, commands in kinds.items() if len(commands) > 1}
    assert not mixed
    for field, commands in spellings.items():
        assert len(set(map(frozenset, commands.values()))) == 1, (field, commands)


def test_words_for_one_thing_are_the_same_in_every_command():
    options = {option for _, option, _, _ in every_option()}
    for spelling, others in (("--k", {"--topk", "--top-k"}), ("--ids", {"--token-ids"})):
        assert spelling in options
        assert not options & others
