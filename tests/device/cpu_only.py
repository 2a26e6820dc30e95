"""Tests that are about the CPU, and why: they are skipped on another device.

A test carries `@pytest.mark.cpu("reason")`, or stands in the table below, by the path of its file
and, where only some tests of the file are meant, a part of their names.
"""

REASONS: dict[tuple[str, str], str] = {}


def reason(item) -> str | None:
    """Why a test stays on the CPU; None if it runs anywhere."""
    marker = item.get_closest_marker("cpu")
    if marker is not None:
        return marker.args[0]
    path = item.path.relative_to(item.config.rootpath).as_posix()
    matches = (
        why for (file, name), why in REASONS.items() if path.startswith(file) and name in item.name
    )
    return next(matches, None)
