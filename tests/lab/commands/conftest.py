"""The commands of the laboratory are run as those of the instrument are."""

from tests.cli.conftest import _built_parser, _patience, _quiet_again, tieline

__all__ = ["_built_parser", "_patience", "_quiet_again", "tieline"]
