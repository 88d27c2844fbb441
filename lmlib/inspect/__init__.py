"""Looking into a model: what it makes of one sequence."""

from lmlib.inspect.inspector import Inspector

__all__ = ["Inspector"]
