"""Run the laboratory's commands with the fixtures of the main command line."""

from tests.cli.conftest import _built_parser, _patience, _quiet_again, tieline

__all__ = ["_built_parser", "_patience", "_quiet_again", "tieline"]
