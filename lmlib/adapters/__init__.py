"""Small weights that train beside a model's own."""

from lmlib.adapters.lora import lora, merged, with_adapters
from lmlib.models.matrices.adapted import without_adapters

__all__ = ["lora", "merged", "with_adapters", "without_adapters"]
