"""Run a function once another library has been imported, without importing it here.

`import tieline` loads neither torch nor transformers. What it adds to them it adds when the program
imports them itself, or at once if it already has.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(name: str, function: Callable[[], object]) -> None:
    """Call `function` after the module `name` has been imported; at once if it already has."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _ImportWatcher(name, function))


class _ImportWatcher(MetaPathFinder):
    """Finds one module as everybody else would, and calls a function after it has run."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self.name, self.function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that calls the function."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self.function)
        return spec


class _CallingLoader(Loader):
    """Runs a module by its own loader, and a function after it."""

    def __init__(self, loader: Loader, function: Callable[[], object]) -> None:
        self.loader, self.function = loader, function

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the function."""
        self.loader.exec_module(module)
        self.function()
