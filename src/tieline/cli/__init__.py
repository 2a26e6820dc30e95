"""The command line, the only room that prints: one file per command.

tieline audit [MODEL]          what low precision and noise do to a model's routing
tieline design                 what a number of experts, active experts and width buys
tieline diff A B               whether two runs route alike and, if not, why
tieline inspect [MODEL]        how near a model's tokens are to a routing tie
tieline merge A B ... -o C     one trace, or one streaming summary, of several
tieline rates SETTING          how fast a router and its experts are learned
tieline reproduce [CLAIM ...]  which statements of the papers hold, with numbers
tieline smooth [MODEL] -o OUT  routing without jumps at ties, and what that repairs
tieline train RECIPE           train a model with any of the gates, and score it
tieline upcycle MODEL -o OUT   a dense model becomes a Mixture of Experts of the same function
"""

from importlib import import_module

from tieline.cli.app import app, main

__all__ = ["app", "main"]

COMMANDS = [
    "audit",
    "design",
    "diff",
    "inspect",
    "merge",
    "rates",
    "reproduce",
    "smooth",
    "train",
    "upcycle",
]
"""One file each; importing it adds the command."""

for _command in COMMANDS:
    import_module(f"tieline.cli.{_command}")
