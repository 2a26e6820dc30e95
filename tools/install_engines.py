"""Installs inference engines into the cache, where `tieline capture` looks for them.

    python -m tools.install_engines              # all that are missing
    python -m tools.install_engines llama.cpp    # some

The commands are those that `tieline capture --list-engines` shows. What an engine takes on disk is
said first; one that is there already is left alone, one that fails or is stopped is removed again.
"""

import argparse
import os
import shutil
import subprocess

from tieline.core.errors import TielineError, require
from tieline.engines import ENGINES, Engine, engine_named

__all__ = ["install", "is_installed"]


def is_installed(engine: Engine) -> bool:
    """Whether the engine's module is in its own folder of the cache."""
    python = engine.folder / "bin" / "python"
    if not python.is_file():
        return False
    code = "import sys, importlib.util as u; sys.exit(u.find_spec(sys.argv[1]) is None)"
    command = [str(python), "-c", code, engine.package]
    return subprocess.run(command, check=False).returncode == 0


def install(engine: Engine) -> None:
    """Run the engine's commands with its folder as `$VENV`; raises on the first that fails."""
    engine.folder.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"VENV": str(engine.folder)}
    try:
        for command in engine.install:
            print(f"+ {command}", flush=True)
            done = subprocess.run(["/bin/sh", "-c", command], env=environment, check=False)
            message = f"{engine.name}: `{command}` left with code {done.returncode}"
            require(not done.returncode, message, TielineError)
    except BaseException:  # Ctrl-C too: half an engine would pass for one that is installed
        shutil.rmtree(engine.folder, ignore_errors=True)
        raise


def main() -> None:
    """Install what the command line names, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", help="names; by default all")
    wanted = [engine_named(name) for name in parser.parse_args().engines or ENGINES]
    missing = [engine for engine in wanted if not is_installed(engine)]
    for engine in missing:
        print(f"{engine.name} takes {engine.size} in {engine.folder}", flush=True)
    try:
        for engine in missing:
            install(engine)
    except TielineError as problem:
        raise SystemExit(f"error: {problem}") from problem
    except KeyboardInterrupt as problem:
        raise SystemExit("stopped: what was half installed is removed") from problem
    for engine in wanted:
        print(f"{engine.name} is in {engine.folder}", flush=True)


if __name__ == "__main__":
    main()
