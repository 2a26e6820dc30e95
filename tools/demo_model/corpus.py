"""The text of the demo model, assembled from the Python that runs this file.

Four sources: the language reference that `pydoc` carries (`pydoc_data.topics`), the docstrings and
the comments of the standard library, read from the files of a fixed list of modules and packages
(none is imported), and the docstrings of the compiled modules. The topics in `HELD_OUT`, which ship
as the text to inspect, are never trained on; a paragraph that they share with anything else is
struck out of the rest.
"""

import ast
import importlib
import io
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

__all__ = ["HELD_OUT", "held_out_text", "tokenizer_documents", "training_documents"]

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

_MORE_MODULES = """
    __future__ _aix_support _bootsubprocess _compat_pickle _compression _markupbase _osx_support
    _py_abc _sitebuiltins aifc asynchat asyncore cProfile cgi cgitb chunk contextvars crypt decimal
    distutils ensurepip idlelib imghdr imp lib2to3 mailcap nntplib nturl2path pipes smtpd sndhdr
    struct sunau telnetlib turtledemo uu xdrlib"""

_COMPILED = """
    builtins sys math cmath itertools _functools _operator array binascii mmap select _socket _ssl
    zlib _bz2 _lzma time _datetime posix _io _collections _json _pickle _struct _random _decimal
    _sqlite3 pyexpat unicodedata _ctypes fcntl grp pwd resource syslog termios _curses gc marshal
    _thread _weakref _codecs _csv _asyncio _contextvars _hashlib _heapq _bisect _statistics
    _zoneinfo faulthandler atexit _signal _sre _string _symtable _tracemalloc _warnings _imp _abc
    _elementtree _queue _posixsubprocess _multiprocessing _locale _opcode _uuid readline"""

HELD_OUT = tuple(_HELD_OUT.split())
MODULES = tuple(_MODULES.split())
MORE_MODULES = tuple(_MORE_MODULES.split())
COMPILED = tuple(_COMPILED.split())
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def held_out_text() -> str:
    """The topics of `HELD_OUT` in order, each paragraph once."""
    return "\n\n".join(_unseen((topics[name] for name in HELD_OUT), set()))


def tokenizer_documents() -> list[str]:
    """The other topics, then the docstrings of `MODULES`, free of every held-out paragraph."""
    held_out = _paragraphs([held_out_text()])
    return [*_reference(held_out), *_unseen(map(_docstrings, MODULES), held_out)]


def training_documents() -> list[str]:
    """All texts without a held-out paragraph; the reference twice, as it is what is held out."""
    core = tokenizer_documents()
    known_paragraphs = _paragraphs([held_out_text(), *core])
    everywhere = (*MODULES, *MORE_MODULES)
    more = [*map(_docstrings, MORE_MODULES), *map(_compiled, COMPILED), *map(_comments, everywhere)]
    return [*core, *_unseen(more, known_paragraphs), *_reference(_paragraphs([held_out_text()]))]


def _reference(known_paragraphs: set[str]) -> Iterator[str]:
    return _unseen(
        (topics[name] for name in sorted(topics) if name not in HELD_OUT), known_paragraphs
    )


def _paragraphs(documents: Iterable[str]) -> set[str]:
    return {_normal(paragraph) for text in documents for paragraph in text.split("\n\n")}


def _unseen(documents: Iterable[str], known_paragraphs: set[str]) -> Iterator[str]:
    """Each document without the paragraphs in `seen`, which grows; an empty one is dropped."""
    for document in documents:
        kept = []
        for paragraph in document.strip().split("\n\n"):
            if _normal(paragraph) not in known_paragraphs:
                kept.append(paragraph.strip("\n"))
            known_paragraphs.add(_normal(paragraph))
        if kept:
            yield "\n\n".join(kept)


def _normal(paragraph: str) -> str:
    """The words of a paragraph, whatever its indentation and line breaks."""
    return " ".join(paragraph.split())


def _docstrings(module: str) -> str:
    """Every docstring of a module or of a package, file by file and breadth first."""
    trees = [ast.parse(file.read_bytes()) for file in _files(module)]
    return "\n\n".join(text for tree in trees for text in _docstrings_of(tree))


def _files(module: str) -> list[Path]:
    """The sources of a module or of a package, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    single = library / f"{module}.py"
    files = [single] if single.exists() else sorted((library / module).rglob("*.py"))
    return [file for file in files if not {"test", "tests", "idle_test"} & set(file.parts)]


def _docstrings_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def _comments(module: str) -> str:
    """The comments of two lines and more of a module or of a package, a paragraph each."""
    blocks = [block for file in _files(module) for block in _blocks_of(file)]
    return "\n\n".join("\n".join(block) for block in blocks if len(block) > 1)


def _blocks_of(file: Path) -> Iterator[list[str]]:
    """Runs of comments that fill their lines, without the marks and one space."""
    block, last = [], 0
    for token in tokenize.tokenize(io.BytesIO(file.read_bytes()).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            if token.start[0] != last + 1:
                yield block
                block = []
            block.append(token.string.lstrip("#").removeprefix(" "))
            last = token.start[0]
    yield block


def _compiled(module: str) -> str:
    """The docstrings of an imported module, of its callables and of the members of its classes."""
    texts = (getattr(thing, "__doc__", None) for thing in _members(importlib.import_module(module)))
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _members(module: ModuleType) -> Iterator[object]:
    yield module
    for _, value in sorted(vars(module).items()):
        if callable(value):
            yield value
        if isinstance(value, type):
            yield from (member for _, member in sorted(vars(value).items()))
