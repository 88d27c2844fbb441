"""Reads and writes GGUF, the format of llama.cpp; needs the package `gguf`."""

from lmlib.gguf.read import to_folder
from lmlib.gguf.write import save

__all__ = ["save", "to_folder"]
