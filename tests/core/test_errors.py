"""How errors of other libraries appear in our messages."""

import pytest

from tieline.core.errors import first_line


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one  \n"), "one"),
        (ValueError(""), "ValueError('')"),
        (
            ValueError("field 'k':\n    TypeError: expected int\nmore"),
            "field 'k': TypeError: expected int",
        ),
        (ValueError("only:"), "only:"),
        (KeyError("added_tokens"), "nothing is named 'added_tokens'"),
        (KeyError("a", "b"), "('a', 'b')"),
    ],
)
def test_the_first_line_says_what_is_wrong(problem, line):
    assert first_line(problem) == line
