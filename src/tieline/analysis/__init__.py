"""What a flip costs: jumps, differences between runs, precision."""
