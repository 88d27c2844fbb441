"""Converts flat tokens between this library's format and seqax's."""

from data_tools.convert.to_lmlib import ConvertedSplit, to_lmlib
from data_tools.convert.to_seqax import to_seqax

__all__ = ["ConvertedSplit", "to_lmlib", "to_seqax"]
