"""Settings: fields that read, check and name themselves."""

import inspect
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.errors import ParameterError
from tieline.core.setting_fields import (
    SettingError,
    Settings,
    above,
    at_least,
    one_of,
    read_layers,
    read_memory,
    read_names,
    read_numbers,
    read_share,
    read_whole_numbers,
    require_setting,
    setting,
    takes_settings,
)


class Loaf(Settings):
    """How a loaf is baked."""

    flour: int = setting(500, check=at_least(1), help="Grams of flour.")
    water: Any = setting(None, read=read_share, help="Water, as a share of the flour.")

    def check(self):
        """Refuse dry dough."""
        wet = self.water is None or self.water > 0.5
        require_setting(wet, "{water} of {flour} {grams} is too dry", grams=self.flour)


class Roll(Loaf):
    """A small loaf."""

    flour: int = setting(50, check=at_least(1), help="Grams of flour.")
    seeds: str = setting("none", check=one_of("none", "poppy"), help="Seeds on it.")


def test_settings_are_frozen_read_and_inherit():
    roll = Roll.of(None, {"water": "70%"})
    assert (roll.flour, roll.water, roll.seeds) == (50, 0.7, "none")
    assert roll == Roll(water=0.7)
    assert Roll.of(roll, {"seeds": "poppy"}) == Roll(water=0.7, seeds="poppy")
    assert Roll.of(roll, {}).changed() == {"water": 0.7}
    assert type(Roll.of(None, {"flour": np.int64(7)}).flour) is int
    assert hash(roll) == hash(Roll(water=0.7))
    with pytest.raises(AttributeError):
        roll.flour = 3
    with pytest.raises(TypeError, match="sugar"):
        Roll.of(roll, {"sugar": 1})
    with pytest.raises(ParameterError, match="settings must be Roll, got Loaf"):
        Roll.of(Loaf(), {})


def test_an_unknown_option_is_refused_with_the_nearest_one_or_all():
    with pytest.raises(TypeError, match=r"Roll has no option 'watr': did you mean 'water'\?"):
        Roll.of(None, {"watr": 0.7})
    with pytest.raises(TypeError, match="Roll has no option 'x': it has flour, water, seeds"):
        Roll.of(Roll(), {"x": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flour": 0}, "flour must be at least 1, got 0"),
        ({"flour": None}, "flour must be given a value, got None"),
        ({"flour": True}, "flour must be a whole number, got True"),
        ({"flour": 2.5}, "flour must be a whole number, got 2.5"),
        ({"water": "wet"}, "water is a share such as 0.01 or 1%, got 'wet'"),
        ({"seeds": "{x}"}, "seeds must be one of none, poppy, got '{x}'"),
        ({"water": "40%"}, "water of flour 50 is too dry"),
    ],
)
def test_a_broken_rule_names_the_field_and_the_value(options, message):
    with pytest.raises(SettingError) as refused:
        Roll.of(None, options)
    assert str(refused.value) == message
    other = pickle.loads(pickle.dumps(refused.value))
    assert str(other) == message
    names = {"flour": "--grams", "water": "--wet", "seeds": "--top"}
    spelled = message
    for name, option in names.items():
        spelled = spelled.replace(name, option)
    assert other.message_naming(names) == spelled


def test_a_function_lists_the_fields_of_its_settings():
    @takes_settings(Roll)
    def bake(oven, *, settings=None, **options):
        """Bake."""
        return Roll.of(settings, options)

    assert list(inspect.signature(bake).parameters) == [
        "oven",
        "settings",
        "flour",
        "water",
        "seeds",
    ]
    assert "    seeds: Seeds on it." in bake.__doc__
    assert bake("hot", seeds="poppy") == bake("hot", settings=Roll(seeds="poppy"))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8))
def test_layers_are_read_as_written(layers):
    assert read_layers(",".join(map(str, layers))) == layers
    assert read_whole_numbers(",".join(map(str, layers))) == tuple(layers)


def test_values_are_read_from_text():
    assert read_layers("0, 2,5-7") == [0, 2, 5, 6, 7]
    assert read_layers("model.layers.3.mlp.gate") == ["model.layers.3.mlp.gate"]
    assert (read_share("0.01"), read_share("1%"), read_share("0")) == (0.01, 0.01, 0.0)
    assert (read_memory("8G"), read_memory("1.5 MiB"), read_memory("7")) == (8 * 10**9, 1500000, 7)
    assert read_numbers("0.5,1e-3") == (0.5, 1e-3)
    assert (read_names("bf16, int4"), read_names("none")) == (["bf16", "int4"], [])


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (read_layers, ["", "1,,2", ",", "5-3", "0-999999", "1, "]),
        (read_share, ["often", "2", "-1%", "nan"]),
        (read_memory, ["8X", "", "-1G", "0", "1e9"]),
        (read_numbers, ["", "1,x", "inf", "1,nan"]),
        (read_whole_numbers, ["1.5", "2,x"]),
    ],
)
def test_text_that_makes_no_sense_is_refused(read, texts):
    for text in texts:
        with pytest.raises(ValueError, match=r"^(takes|is|has|must)"):
            read(text)


@given(st.integers(), st.integers(-5, 5))
def test_bounds_are_what_they_say(value, bound):
    assert (at_least(bound)(value) == "") == (value >= bound)
    assert (above(float(bound))(value) == "") == (value > bound)


def test_numbers_that_torch_cannot_take_are_refused():
    assert at_least(0)(2**63 - 1) == above(0.0)(3.4e38) == ""
    assert at_least(0)(2**63) == "must be at most 9,223,372,036,854,775,807"
    assert at_least(2, most=1000)(1001) == "must be at most 1,000"
    assert above(0.0)(1e39) == "must be at most 3.4e+38"
