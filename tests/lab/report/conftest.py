"""Results that several tests draw."""

from tests.report.conftest import ids_only, result

__all__ = ["ids_only", "result"]
