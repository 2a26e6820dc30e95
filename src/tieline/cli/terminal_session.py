"""Exit codes, messages on stderr, Ctrl-C, closed pipes and terminals without Unicode.

exit code 0   success
          1   a stated condition failed
          2   bad input or environment: one message on stderr, no incomplete output
          3   a bug of ours; --debug shows where
        130   stopped by Ctrl-C

This module imports almost only the standard library, so that Ctrl-C is handled from the start.
"""

import codecs
import gc
import io
import os
import re
import signal
import sys
import threading
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from tieline.core.text import PrintableStream, printable, unfiltered_stream

FINE, CONDITION_HELD, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130
SHOW_CURSOR = "\x1b[?25h"

ASCII = {"·": "-", "–": "-", "—": "-", "−": "-", "…": "...", "×": "x", "≥": ">=", "≤": "<="}
ASCII |= {"±": "+-", "→": "->", "←": "<-", "≈": "~", "∞": "inf", "√": "sqrt", "∈": "in", "∂": "d"}
ASCII |= {"▲": "!", "◆": "*", "●": "-", "⌊": "floor(", "⌋": ")", "‖": "|", "Σ": "sum", "ε": "eps"}
"""Replacements of characters that a terminal without Unicode cannot print."""

_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")


class _InterruptState:
    """State of Ctrl-C: the first press raises KeyboardInterrupt, the next exits at once.

    Attributes:
        handled: whether a block is running that cleans up after KeyboardInterrupt.
        pressed: whether Ctrl-C was pressed.
    """

    handled = False
    pressed = False


class _SessionState:
    """State of the terminal session.

    Attributes:
        ends_process: whether a session is open with which the process ends.
    """

    ends_process = False


def print_to_stderr(message: str) -> None:
    """Print a message to stderr, if stderr is open.

    Further lines of the message are indented, so that a name with a line break does not look like
    another message.
    """
    with suppress(OSError, ValueError):
        print(printable(message).replace("\n", "\n  "), file=sys.stderr, flush=True)


@contextmanager
def warnings_as_notes(*kinds: type[Warning]) -> Iterator[None]:
    """Print warnings of these kinds to stderr as one line each; others are shown as usual."""
    with warnings.catch_warnings():
        show_as_usual = warnings.showwarning

        def print_as_note(
            message: Any, category: type[Warning], *origin: Any, **options: Any
        ) -> None:
            if issubclass(category, kinds):
                print_to_stderr(f"note: {message}")
            else:
                show_as_usual(message, category, *origin, **options)

        warnings.showwarning = print_as_note
        yield


@contextmanager
def open_terminal_session(ends_process: bool) -> Iterator[None]:
    """Handle Ctrl-C and unprintable characters while the block runs.

    Args:
        ends_process: whether the process ends with the block. Ctrl-C is then ignored while large
            libraries shut down.
    """
    if ends_process:
        _open_closed_streams()
    _SessionState.ends_process = ends_process
    try:
        with _printable_streams(), _interrupts_handled(ends_process):
            yield
    finally:
        _SessionState.ends_process = False


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import modules in the block without collecting garbage, if the process ends with the session.

    Modules stay until the end, but the collector walks over all their objects each time that a
    quarter was added: a seventh of the CPU time of `tieline inspect`. Afterwards it leaves out what
    there is by then (`gc.freeze`), so that only processes that end soon may do this.
    """
    if not _SessionState.ends_process:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _open_closed_streams() -> None:
    """Open /dev/null for standard streams that are closed, as by `>&-`.

    The next opened file would otherwise get their file number, and the output of libraries.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):  # closed for Python alone
                os.fstat(number)
                continue
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            setattr(sys, name, os.fdopen(handle, "r" if number == 0 else "w"))


@contextmanager
def _printable_streams() -> Iterator[None]:
    """Pass all output in the block, also of libraries, through `printable`."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="tieline.plain")
    sys.stdout, sys.stderr = (s and PrintableStream(s) for s in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


@contextmanager
def _interrupts_handled(ends_process: bool) -> Iterator[None]:
    """Handle Ctrl-C while the block runs, if it runs in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    _InterruptState.pressed = _InterruptState.handled = False
    if handler is not signal.SIG_IGN:  # as under nohup, or in the background of a script
        signal.signal(signal.SIGINT, _on_interrupt)
    sys.unraisablehook = _exit_on_interrupt
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ends_process else handler)
        sys.unraisablehook = hook
        # after a KeyboardInterrupt in executed text (`exec`, as in libraries) `python -m` kills
        # itself, even if it was caught; executing another text clears this state of Python
        exec("")  # noqa: S102


@contextmanager
def handle_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C in the block, so that it can clean up."""
    before, _InterruptState.handled = _InterruptState.handled, True
    try:
        yield
    finally:
        _InterruptState.handled = before


def was_stopped() -> bool:
    """Return whether Ctrl-C was pressed, so that later errors are consequences of it."""
    return _InterruptState.pressed


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt at the first Ctrl-C if it is handled, else exit at once."""
    if _InterruptState.pressed or not _InterruptState.handled:
        _exit_at_once()
    _InterruptState.pressed = True
    raise KeyboardInterrupt


def _exit_at_once() -> NoReturn:
    """Exit the process immediately, since imports and destructors may swallow an exception."""
    stderr = unfiltered_stream(sys.stderr)
    if stderr is not None and stderr.isatty():
        with suppress(OSError, ValueError):
            print(SHOW_CURSOR, file=stderr, flush=True)
    print_to_stderr("stopped")
    os._exit(INTERRUPTED)


def _exit_on_interrupt(problem: Any) -> None:
    """Exit on a KeyboardInterrupt that Python cannot raise, as in a destructor."""
    if issubclass(problem.exc_type, KeyboardInterrupt):
        _exit_at_once()
    sys.__unraisablehook__(problem)


@contextmanager
def closed_pipe_ignored() -> Iterator[None]:
    """Ignore in the block that the reader closed stdout, as in `tieline train --list | head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        mute_stdout()


def mute_stdout() -> None:
    """Discard all further output to stdout."""
    with suppress(OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        os.close(null_device)


def _replace_unencodable(problem: UnicodeError) -> tuple[str, int]:
    """Codec error handler that replaces characters outside of the terminal's encoding."""
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    text = problem.object[problem.start : problem.end]
    raised = _SUPERSCRIPTS.sub(lambda match: "^" + unicodedata.normalize("NFKD", match[0]), text)
    return "".join(map(_ascii_spelling, raised)), problem.end


def _ascii_spelling(sign: str) -> str:
    """Return an ASCII text for a character."""
    if sign.isascii():
        return sign
    if sign in ASCII:
        return ASCII[sign]
    name = unicodedata.name(sign, "")
    if name.startswith("GREEK") and "LETTER" in name:
        letter = name.split("LETTER ")[1].split()[0]
        return letter.capitalize() if "CAPITAL" in name else letter.lower()
    simple = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    return simple or "?"


codecs.register_error("tieline.plain", _replace_unencodable)
