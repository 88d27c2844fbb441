"""Declarations of families' folders in the format of Hugging Face, which `lmlib.hf` uses."""
