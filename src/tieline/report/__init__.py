"""Results as pages, tables and figures: draws what it is given and computes nothing."""
