"""The families of Hugging Face's folders that a command knows."""

import importlib
from collections.abc import Collection

from lmlib.hf.families import FAMILIES
from lmlib.hf.family import Family
from runner.errors import ConfigError


def known_families(trusted: Collection[str]) -> tuple[Family, ...]:
    """Those in `FAMILIES` of the modules `trusted`, where there are such, then lmlib's: of two with
    the same `model_type` the first is taken.

    Raises:
      ConfigError: if there is no such module, it cannot be imported, or its `FAMILIES` holds
        something else.
    """
    own = list[Family]()
    for name in trusted:
        flag = f"--trust_module={name}"
        try:
            found = getattr(importlib.import_module(name), "FAMILIES", ())
        except Exception as error:  # whatever a module raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"{flag} cannot be imported ({reason:.300}); if it is yours, set PYTHONPATH"
            ) from error
        if not isinstance(found, list | tuple) or not all(isinstance(f, Family) for f in found):
            raise ConfigError(
                f"{flag}: its FAMILIES is {found!r:.80}, and has to be a list of "
                "lmlib.hf.family.Family"
            )
        own += found
    return (*own, *FAMILIES)
