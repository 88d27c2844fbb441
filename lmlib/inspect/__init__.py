"""Tools for looking into a model: its activations, attention and logits for one sequence."""

from lmlib.inspect.inspector import Inspector

__all__ = ["Inspector"]
