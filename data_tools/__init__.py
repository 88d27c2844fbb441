"""Command lines and functions that make data sets for `lmlib.data`."""
