"""Configs: loading, overriding, saving and comparing."""
