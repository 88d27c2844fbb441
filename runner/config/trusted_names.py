"""Classes and functions that a file names, looked up only if they are trusted.

A file may come from a stranger. To import a module is to run it, and a module's namespace leads to
others (`numpy`, `os`). So what is not listed is not imported, and whatever a name stands for must
itself be defined in what is listed.
"""

import importlib
from collections.abc import Collection
from typing import Any

# Of what the data of a run consists.
DATA_NAMES = frozenset(
    {
        "lmlib.data.flat_tokens.FlatTokens",
        "lmlib.data.mixture.Mixture",
        "lmlib.data.mixture.Stage",
        "lmlib.data.synthetic.Synthetic",
        "data_tools.hf_stream.source.HFStream",
        "data_tools.standard_library.standard_library",
        "builtins.dict",
        "builtins.list",
        "builtins.tuple",
    }
)


class UntrustedNameError(ValueError):
    """Something that is not trusted is named.

    Attributes:
      name: the full name, `module.function`.
      module: the module to trust if it should be.
    """

    def __init__(self, name: str, module: str):
        super().__init__(f"{name!r:.200} is not trusted")
        self.name = name
        self.module = module


def is_trusted(name: str, trusted: Collection[str]) -> bool:
    """Whether the full `name` is one of `trusted`, or lies in a module or class that is."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in trusted for end in range(1, len(parts) + 1))


def named_value(module: str, name: str, trusted: Collection[str]) -> Any:
    """What `name` is in `module`: a function or class, `Outer.inner` for one in a class.

    Args:
      trusted: full names of modules, which stand for all in them, and of single things.

    Raises:
      UntrustedNameError: if it is not trusted; nothing was imported if its name is not.
      ImportError, AttributeError: if it is not there.
      Exception: whatever a trusted module raises when it is imported.
    """
    asked = f"{module}.{name}"
    if not is_trusted(asked, trusted):
        raise UntrustedNameError(asked, module)
    value = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
        own = full_name(value)
        if own is None or not is_trusted(own, trusted):
            raise UntrustedNameError(own or asked, module if own is None else value.__module__)
    return value


def full_name(value: Any) -> str | None:
    """`module.name` of a function, a class or the class of an instance; None if it has none."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else None
