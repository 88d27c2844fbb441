"""Converts seqax's flat tokens to this library's."""

from data_tools.convert.to_lmlib import ConvertedSplit, to_lmlib

__all__ = ["ConvertedSplit", "to_lmlib"]
