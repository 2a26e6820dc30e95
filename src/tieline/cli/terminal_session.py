"""How a run ends: exit codes, last words, Ctrl-C, closed pipes and terminals without Unicode.

exit code 0   fine
          1   a stated condition failed
          2   bad input or environment: one message on stderr, nothing half-written
          3   a bug of ours; --debug shows where
        130   stopped by Ctrl-C

Nothing outside the standard library is imported here, so that Ctrl-C has an answer from the first
moment on.
"""

import codecs
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

PLAIN = {"·": "-", "–": "-", "—": "-", "−": "-", "…": "...", "×": "x", "≥": ">=", "≤": "<="}
PLAIN |= {"±": "+-", "→": "->", "←": "<-", "≈": "~", "∞": "inf", "√": "sqrt", "∈": "in", "∂": "d"}
PLAIN |= {"▲": "!", "◆": "*", "●": "-", "⌊": "floor(", "⌋": ")", "‖": "|", "Σ": "sum", "ε": "eps"}
"""Replacements for characters that a terminal without Unicode cannot show."""

_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")


class _Stop:
    """State of Ctrl-C: the first press raises KeyboardInterrupt, the next exits at once.

    Attributes:
        handled: whether a block runs that cleans up after KeyboardInterrupt.
        pressed: whether Ctrl-C was pressed.
    """

    handled = False
    pressed = False


def print_to_stderr(message: str) -> None:
    """Print a message to stderr, if stderr is open.

    Further lines of the message are indented, so that no name with a line end passes for another
    message.
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
    """Handle Ctrl-C and characters that the terminal lacks while the block runs.

    Args:
        ends_process: whether the process ends with the block. Ctrl-C is then ignored while large
            libraries shut down.
    """
    if ends_process:
        _open_closed_streams()
    with _printable_streams(), _interrupts_handled(ends_process):
        yield


def _open_closed_streams() -> None:
    """Discard what goes to a stream that is closed, as by `>&-`.

    The next file that is opened would otherwise take its number, and what libraries print.
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
    """Let whatever is printed in the block, also by libraries, pass through `printable`."""
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
    _Stop.pressed = _Stop.handled = False
    if handler is not signal.SIG_IGN:  # as under nohup, or in the background of a script
        signal.signal(signal.SIGINT, _on_interrupt)
    sys.unraisablehook = _exit_on_interrupt
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ends_process else handler)
        sys.unraisablehook = hook
        # `python -m` kills itself after a KeyboardInterrupt in executed text, as libraries have it,
        # even if it was caught: only the next executed text clears that note of Python
        exec("")  # noqa: S102


@contextmanager
def handle_interrupts() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt in the block, so that it can clean up."""
    before, _Stop.handled = _Stop.handled, True
    try:
        yield
    finally:
        _Stop.handled = before


def was_stopped() -> bool:
    """Return whether Ctrl-C was pressed; errors raised afterwards are consequences of it."""
    return _Stop.pressed


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C."""
    if _Stop.pressed or not _Stop.handled:
        _exit_at_once()
    _Stop.pressed = True
    raise KeyboardInterrupt


def _exit_at_once() -> NoReturn:
    """Exit from anywhere; imports and destructors of libraries do not survive an exception."""
    stderr = unfiltered_stream(sys.stderr)
    if stderr is not None and stderr.isatty():
        with suppress(OSError, ValueError):
            print(SHOW_CURSOR, file=stderr, flush=True)
    print_to_stderr("stopped")
    os._exit(INTERRUPTED)


def _exit_on_interrupt(problem: Any) -> None:
    """Exit on a KeyboardInterrupt that Python cannot raise, such as in a destructor."""
    if issubclass(problem.exc_type, KeyboardInterrupt):
        _exit_at_once()
    sys.__unraisablehook__(problem)


@contextmanager
def closed_pipe_ignored() -> Iterator[None]:
    """Ignore that stdout was closed by its reader, as in `tieline train --list | head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        mute_stdout()


def mute_stdout() -> None:
    """Discard everything printed to stdout from now on."""
    with suppress(OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        os.close(null_device)


def _replace_unencodable(problem: UnicodeError) -> tuple[str, int]:
    """Replace characters that the terminal's encoding lacks, as a codec error handler."""
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    text = problem.object[problem.start : problem.end]
    raised = _RAISED.sub(lambda match: "^" + unicodedata.normalize("NFKD", match[0]), text)
    return "".join(map(_ascii_spelling, raised)), problem.end


def _ascii_spelling(sign: str) -> str:
    """ASCII text for a character."""
    if sign.isascii():
        return sign
    if sign in PLAIN:
        return PLAIN[sign]
    name = unicodedata.name(sign, "")
    if name.startswith("GREEK") and "LETTER" in name:
        letter = name.split("LETTER ")[1].split()[0]
        return letter.capitalize() if "CAPITAL" in name else letter.lower()
    simple = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    return simple or "?"


codecs.register_error("tieline.plain", _replace_unencodable)
