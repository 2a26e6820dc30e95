"""The command line, the only room that prints: one file per command.

tieline inspect [MODEL]        how near a model's tokens are to a routing tie
tieline merge A B ... -o C     one streaming summary of several
"""

from importlib import import_module

from tieline.cli.app import app, main

__all__ = ["app", "main"]

COMMANDS = ["inspect", "merge"]
"""One file each; importing it adds the command."""

for _command in COMMANDS:
    import_module(f"tieline.cli.{_command}")
