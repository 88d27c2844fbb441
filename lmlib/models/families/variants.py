"""Families that are another one but for a few arguments, which are all that they say."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lmlib.models.decoder import Decoder

_Family = Callable[..., Decoder]


def variant(family: _Family, without: str = "") -> Callable[[_Family], _Family]:
    """Makes a family of a function that takes the arguments of `family`, all by name.

    The new family has the parameters of `family` in their order, but for those that are named in
    `without`. Those that the function itself has take the place of their namesakes, or come last;
    they may have another default.
    """

    def made(function: _Family) -> _Family:
        signature = inspect.signature(function)
        own = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        known = dict(inspect.signature(family).parameters)
        key = known.pop("key")
        for name in without.split():
            del known[name]
        for name, parameter in own.items():
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            known[name] = parameter.replace(kind=kind)
        parameters = [*known.values(), key]

        @functools.wraps(function)
        def family_of_all(*positional: Any, **named: Any) -> Decoder:
            bound = shown.bind(*positional, **named)
            bound.apply_defaults()
            return function(**bound.arguments)

        shown = signature.replace(parameters=parameters)
        family_of_all.__signature__ = shown  # type: ignore[attr-defined]
        return family_of_all

    return made
