"""Reads and writes adapters in PEFT's format (https://github.com/huggingface/peft)."""

from lmlib.hf.peft.config import holds_adapters, read_config
from lmlib.hf.peft.load import Adapters, adapters_in, load_adapters
from lmlib.hf.peft.save import save_adapters, shapes_of_base, written_whole

__all__ = [
    "Adapters",
    "adapters_in",
    "holds_adapters",
    "load_adapters",
    "read_config",
    "save_adapters",
    "shapes_of_base",
    "written_whole",
]
