"""The text of the shipped model, assembled from the Python that runs this file.

Two sources: the language reference that `pydoc` carries (`pydoc_data.topics`) and the docstrings of
the standard library, read from the syntax trees of a fixed list of modules and packages (none is
imported). The topics in `HELD_OUT`, which ship as the text to inspect, are never trained on; a
paragraph that they share with anything else is struck out of the rest.
"""

import ast
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

__all__ = ["HELD_OUT", "held_out_text", "training_documents"]

_HELD_OUT = """
    assignment atom-literals augassign bitwise bltin-null-object break class context-managers
    customization dict exceptions floating function identifiers import lambda nonlocal objects power
    sequence-types specialattrs strings try typesmapping typesseq while"""

_MODULES = """
    _collections_abc _pydecimal _pyio _strptime _threading_local _weakrefset abc argparse ast
    base64 bdb bisect bz2 calendar cmd code codecs codeop colorsys compileall configparser
    contextlib copy copyreg csv dataclasses datetime difflib dis doctest enum filecmp fileinput
    fnmatch fractions ftplib functools genericpath getopt getpass gettext glob graphlib gzip hashlib
    heapq hmac imaplib inspect io ipaddress keyword linecache locale lzma mailbox mimetypes
    modulefinder netrc ntpath numbers opcode operator optparse os pathlib pdb pickle pickletools
    pkgutil platform plistlib poplib posixpath pprint profile pstats pty py_compile pyclbr pydoc
    queue quopri random reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil signal
    site smtplib socket socketserver ssl stat statistics string stringprep subprocess symtable
    sysconfig tabnanny tarfile tempfile textwrap threading timeit token tokenize trace traceback
    tracemalloc tty turtle types typing uuid warnings wave weakref webbrowser zipapp zipfile
    zipimport asyncio collections concurrent ctypes curses dbm email encodings html http importlib
    json logging multiprocessing re sqlite3 tkinter tomllib unittest urllib venv wsgiref xml xmlrpc
    zoneinfo"""

HELD_OUT = tuple(_HELD_OUT.split())
MODULES = tuple(_MODULES.split())
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def held_out_text() -> str:
    """The topics of `HELD_OUT` in order, each paragraph once."""
    return "\n\n".join(_unseen((topics[name] for name in HELD_OUT), set()))


def training_documents() -> list[str]:
    """The other topics and the docstrings of each module, free of every held-out paragraph."""
    seen = {_normal(paragraph) for paragraph in held_out_text().split("\n\n")}
    reference = (topics[name] for name in sorted(topics) if name not in HELD_OUT)
    return list(_unseen([*reference, *map(_docstrings, MODULES)], seen))


def _unseen(documents: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Each document without the paragraphs in `seen`, which grows; an empty one is dropped."""
    for document in documents:
        kept = []
        for paragraph in document.strip().split("\n\n"):
            if _normal(paragraph) not in seen:
                kept.append(paragraph.strip("\n"))
            seen.add(_normal(paragraph))
        if kept:
            yield "\n\n".join(kept)


def _normal(paragraph: str) -> str:
    """The words of a paragraph, whatever its indentation and line breaks."""
    return " ".join(paragraph.split())


def _docstrings(module: str) -> str:
    """Every docstring of a module or of a package, file by file and breadth first."""
    library = Path(sysconfig.get_path("stdlib"))
    single = library / f"{module}.py"
    files = [single] if single.exists() else sorted((library / module).rglob("*.py"))
    files = [file for file in files if not {"test", "tests"} & set(file.parts)]
    trees = [ast.parse(file.read_bytes()) for file in files]
    return "\n\n".join(text for tree in trees for text in _docstrings_of(tree))


def _docstrings_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text
