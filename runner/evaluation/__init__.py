"""Measures saved models on data sets: what to read, what comes out, how it is shown."""
