"""Documents in, a split of flat tokens out: `python -m data_tools.pretokenize`."""
