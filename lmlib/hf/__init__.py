"""Reads and writes weights in Hugging Face's format."""

from lmlib.hf.load import load
from lmlib.hf.peft.load import load_adapters
from lmlib.hf.peft.save import save_adapters
from lmlib.hf.save import save

__all__ = ["load", "load_adapters", "save", "save_adapters"]
