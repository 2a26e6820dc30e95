"""What every room rests on: errors, ranking, numerics, statistics, records, files, parallel work."""
