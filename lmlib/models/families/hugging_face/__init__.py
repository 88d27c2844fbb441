"""Declarations of families' folders in Hugging Face's format, used by `lmlib.hf`."""
