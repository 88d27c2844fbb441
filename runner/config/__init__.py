"""Configs: found, changed, saved, read back and compared."""
