"""The command line; the module `commands` has the commands of the instrument.

Look    tieline inspect [MODEL]        how near a model's tokens are to a routing tie
        tieline diff A B               whether two runs route alike and, if not, why
        tieline audit [MODEL]          what low precision and noise do to a model's routing
        tieline check ROUTES ...       whether files of routes are sound
Repair  tieline smooth [MODEL] -o OUT  make routing continuous at ties
Files   tieline capture [MODEL] -o TRACE   what an inference engine routes
        tieline convert IN OUT --to FORM   routes in the form of another program
        tieline merge A B ... -o C     join traces, or streaming summaries

Commands of the laboratory (train, design, rates, reproduce, reroute, upcycle, soften, slice, walks,
attention, frontier) and of other packages are added as plug-ins (`tieline.core.plugins`).
"""

from collections.abc import Sequence
from typing import NoReturn

from tieline.cli.terminal_session import open_terminal_session

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit the process with its exit code."""
    with open_terminal_session(ends_process=arguments is None):  # before anything else is imported
        from tieline.cli.app import run

        raise SystemExit(run(arguments))
