"""Reads and writes weights in Hugging Face's format."""

from lmlib.hf.load import load
from lmlib.hf.peft import load_adapters, save_adapters
from lmlib.hf.save import save

__all__ = ["load", "load_adapters", "save", "save_adapters"]
