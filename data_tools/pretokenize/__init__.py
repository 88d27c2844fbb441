"""Converts documents to a split of flat tokens: `python -m data_tools.pretokenize`."""
