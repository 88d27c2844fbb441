"""A decorator for families that state only their differences from Llama."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import llama

_Family = Callable[..., Decoder]
# Arguments of `llama` that change the architecture, which published families do not take.
PARTS = "attention feed_forward layer logit_cap"


def variant(without: str = "") -> Callable[[_Family], _Family]:
    """Makes a family from a function that takes the arguments of `llama` by name.

    The family has the parameters of `llama` in their order, except for `PARTS` and the names in
    `without`. Parameters of the function replace them, or come last.
    """

    def made(function: _Family) -> _Family:
        signature = inspect.signature(function)
        known = dict(inspect.signature(llama).parameters)
        key = known.pop("key")
        for name in [*PARTS.split(), *without.split()]:
            del known[name]
        for name, own in signature.parameters.items():
            if own.kind is own.VAR_KEYWORD:
                continue
            default = known[name].default if own.default is own.empty else own.default
            known[name] = own.replace(kind=own.POSITIONAL_OR_KEYWORD, default=default)
        shown = signature.replace(parameters=[*known.values(), key])

        @functools.wraps(function)
        def family(*positional: Any, **named: Any) -> Decoder:
            bound = shown.bind(*positional, **named)
            bound.apply_defaults()
            return function(**bound.arguments)

        family.__signature__ = shown  # type: ignore[attr-defined]
        return family

    return made
