"""Adapters in the format of PEFT, in and out (https://github.com/huggingface/peft)."""

from lmlib.hf.peft.load import load_adapters
from lmlib.hf.peft.save import save_adapters

__all__ = ["load_adapters", "save_adapters"]
