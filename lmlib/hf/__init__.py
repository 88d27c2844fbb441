"""Weights in Hugging Face's format, in and out."""

from lmlib.hf.load import load
from lmlib.hf.save import save

__all__ = ["load", "save"]
