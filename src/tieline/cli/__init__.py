"""The command line, the only room that prints: one file per command.

Look    tieline inspect [MODEL]        how near a model's tokens are to a routing tie
        tieline diff A B               whether two runs route alike and, if not, why
        tieline audit [MODEL]          what low precision and noise do to a model's routing
Repair  tieline smooth [MODEL] -o OUT  make routing continuous at ties
        tieline upcycle MODEL -o OUT   turn a dense model into a Mixture of Experts
Files   tieline merge A B ... -o C     join traces, or streaming summaries
Lab     tieline train RECIPE           train a model with any of the gates, and score it
        tieline design                 what a number of experts, active experts and width buys
        tieline rates SETTING          how fast a router and its experts are learned
        tieline reproduce [CLAIM ...]  which statements of the papers hold, with numbers
"""

from importlib import import_module

from tieline.cli.app import GROUPS, app, main

__all__ = ["app", "main"]

for _commands in GROUPS.values():
    for _command in _commands:
        import_module(f"tieline.cli.{_command}")
