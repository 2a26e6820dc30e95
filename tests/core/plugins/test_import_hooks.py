import subprocess
import sys

from tieline.core.plugins import when_imported


def test_a_function_runs_at_once_for_a_module_that_is_there():
    calls = []
    when_imported("sys", lambda: calls.append(1))
    assert calls == [1]


def test_a_function_runs_once_after_a_module_was_imported(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, values = list(sys.meta_path), []
    when_imported("waited_for", lambda: values.append(sys.modules["waited_for"].value))
    assert values == []
    import waited_for

    assert values == [1]
    assert waited_for.__spec__.name == "waited_for"
    assert sys.meta_path == before


def test_a_module_that_does_not_exist_is_missing_as_ever():
    code = (
        "from tieline.core.plugins import when_imported\n"
        "when_imported('no_such_module', lambda: 1 / 0)\n"
        "try: import no_such_module\n"
        "except ModuleNotFoundError: pass\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
