"""Reads the config.json of an earlier run, which may come from a stranger.

Fiddle imports every name in such a file. Here only the parts of configs are allowed: data sources,
trackers, and the modules of lmlib that never write files or start processes. Other modules of lmlib
would let a stranger's file write anywhere. To load a run that uses your own modules, trust them by
name: `trusted=["my_models"]`, or `--trust_module=my_models` on the command line.
"""

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import fiddle as fdl
from fiddle import daglish
from fiddle.experimental import serialization

from lmlib.storage.stored_json import parse_json, read_text
from lmlib.storage.unlinked import LinkError, unlinked
from runner.config.text import nodes, parameters, text_of
from runner.errors import ConfigError, did_you_mean

# Names in Fiddle's own JSON.
FIDDLE_NAMES = {
    "fiddle._src.config.BuildableTraverserMetadata",
    "fiddle._src.config.Config",
    "fiddle._src.signatures.NoValue",
    "fiddle._src.partial.ArgFactory",
    "fiddle._src.partial.Partial",
}
# The `__module__` of the functions of jax.nn.
JAX_NN = "jax._src.nn"
TRUSTED = FIDDLE_NAMES | {
    "experiments",
    "lmlib.adapters",
    "lmlib.compute.Compute",
    "lmlib.evaluate.suite.suite.Suite",
    "lmlib.experiment",
    "lmlib.guard.Guard",
    "lmlib.inspect",
    "lmlib.losses",
    "lmlib.models",
    "lmlib.optim",
    "lmlib.parallel.mesh",
    "lmlib.trackers",
    "optax",
    "jax.nn",
    *(f"lmlib.data.{name}" for name in ("flat_tokens.FlatTokens", "synthetic.Synthetic")),
    *(f"lmlib.data.mixture.{name}" for name in ("Mixture", "Stage")),
    "data_tools.hf_stream.source.HFStream",
    "data_tools.standard_library.standard_library",
    JAX_NN,
    *(f"jax.numpy.{dtype}" for dtype in ("bfloat16", "float16", "float32", "float64")),
    *(
        f"builtins.{kind}"
        for kind in (
            *("dict", "list", "tuple", "set", "frozenset"),
            *("slice", "bool", "int", "float", "str"),
        )
    ),
}

_LARGEST = 10_000_000  # bytes; a config has a few thousand
_MOST_VALUES = 100_000  # counting a shared value each time it is used
_DEEPEST = 50  # levels of nesting


class UntrustedNameError(ValueError):
    """A config names something that is not trusted.

    Attributes:
      name: the full name, `module.function`.
      module: the module to trust, if the user wants to.
    """

    def __init__(self, name: str, module: str):
        super().__init__(f"{name!r:.200} is not trusted")
        self.name = name
        self.module = module


def is_trusted(name: str, trusted: Collection[str]) -> bool:
    """True if the full `name`, or a module or class around it, is one of `trusted`."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in trusted for end in range(1, len(parts) + 1))


def named_value(module: str, name: str, trusted: Collection[str]) -> Any:
    """Imports `name` of `module`: a function, a class, or `Outer.inner` for one inside a class.

    A module leads to others (`numpy`, `os`), so the value must itself be defined in a trusted
    place.

    Args:
      trusted: full names of modules, which include everything in them, and of single objects.

    Raises:
      UntrustedNameError: if it is not trusted; a name that is not trusted is never imported.
      ImportError, AttributeError: if it does not exist.
      Exception: anything that a trusted module raises when it is imported.
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
    """Returns `module.name` of a function, a class or an instance's class, or `None`."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else None


def read_config(file: Path, trusted: Collection[str] = ()) -> fdl.Config:
    """Reads the config in `file`, which may name only `TRUSTED` and the modules `trusted`.

    Raises `ConfigError` if it cannot be read, is not a config, is absurdly large, or names
    something else; that is then not imported.
    """
    policy = _Policy(TRUSTED | set(trusted))
    try:
        text = read_text(unlinked(file.parent, file.name), _LARGEST)
        parse_json(text)  # Fiddle does not check this
        cfg = serialization.load_json(text, policy)
        if not isinstance(cfg, fdl.Config):
            raise ValueError(f"it holds a {type(cfg).__name__}")
        _check_size(cfg)
        settings = [(node, parameters(node)) for node in nodes(cfg)]
    except MemoryError:  # not caused by the file
        raise
    except UntrustedNameError as error:
        raise ConfigError(
            f"{file} refers to {error.name}, which a saved config may not run unasked: if you "
            f"trust that code, give --trust_module={error.module}"
        ) from error
    except LinkError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ImportError, AttributeError) as error:
        missing = str(error).partition("\n")[0]
        raise ConfigError(f"{file}: {missing}. If it is yours, set PYTHONPATH.") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{file} is not a saved Fiddle config ({reason:.200})") from error
    for node, known in settings:
        for name in set(fdl.ordered_arguments(node, include_positional=False)) - set(known):
            owner, near = text_of(fdl.get_callable(node)), did_you_mean(name, known)
            raise ConfigError(f"{file} sets {name!r}, but {owner} has none (any more). {near}")
    return cfg


class _Policy(serialization.PyrefPolicy):
    """Import policy that Fiddle asks before it imports anything."""

    def __init__(self, trusted: Collection[str]) -> None:
        self._trusted = trusted

    def allows_import(self, module: str, symbol: str) -> bool:
        name = f"{module}.{symbol}"
        parts = name.split(".") if isinstance(symbol, str) else [""]  # a file may say null
        if not all(part.isidentifier() for part in parts):
            raise ValueError(f"{name!r:.80} is not a Python name")
        named_value(module, symbol, self._trusted)
        return True

    def allows_value(self, value: Any) -> bool:
        return True  # `named_value` has checked it


def _check_size(cfg: fdl.Config) -> None:
    """Refuses values that are nested too deeply, or far too large once shared parts are copied."""
    sizes: dict[int, int] = {}

    def size(value: Any, depth: int) -> int:
        if depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} deep")
        if id(value) not in sizes:
            traverser = daglish.find_node_traverser(type(value))
            parts = traverser.flatten(value)[0] if traverser else ()
            sizes[id(value)] = 1 + sum(size(part, depth + 1) for part in parts)
        return sizes[id(value)]

    if size(cfg, 0) > _MOST_VALUES:
        raise ValueError(f"it consists of more than {_MOST_VALUES:,} values")
