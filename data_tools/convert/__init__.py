"""Converts seqax's flat tokens to this library's: `python -m data_tools.convert`."""
