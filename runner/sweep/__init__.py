"""Sweeps: many runs that differ in a few settings, their order and their results."""
