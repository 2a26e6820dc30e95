"""Figures and pages: draws results, computes nothing."""
