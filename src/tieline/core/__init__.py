"""Foundations: errors, ranking, numerics, statistics, records, files, parallel work."""
