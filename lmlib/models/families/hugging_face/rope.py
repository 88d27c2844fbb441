"""Reads and writes rotary positions in config.json.

Old files have `rope_theta` and `rope_scaling`; new ones have everything in `rope_parameters`. If a
file has both, only `rope_scaling` is used, as in `transformers`. Both are written, for readers that
know only one of them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lmlib.models.families.hugging_face.settings import FolderError, Settings
from lmlib.models.parts.rope import Rotary, Scaling
from lmlib.models.parts.rope_scaling import (
    Dynamic,
    Linear,
    Llama3,
    LongRope,
    Yarn,
    long_rope_amplitude,
    yarn_amplitude,
)

_LONGEST, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_KINDS: dict[str, type] = dict(
    linear=Linear, dynamic=Dynamic, llama3=Llama3, yarn=Yarn, longrope=LongRope
)
_FIELDS = {  # fields of scalings, by key
    "factor": "factor",
    _ORIGINAL: "original",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "beta_fast": "fast",
    "beta_slow": "slow",
    "attention_factor": "amplitude",
    "truncate": "whole",
    "short_factor": "short",
    "long_factor": "long",
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """The keys of a family's rotary positions."""

    theta: float = 10_000.0  # default base of the wavelengths
    scalings: tuple[type, ...] = (Linear, Dynamic, Llama3, Yarn)  # supported kinds
    partial: bool = False  # True if the family supports fractions of rotated coordinates
    fraction: float = 1.0  # the default
    # The keys of base and fraction outside `rope_parameters`.
    keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    absent: Mapping[str, Any] | None = None  # default of `rope_parameters`; `None`: empty
    kind: str = "rope_type"  # the key of the scaling's type for old readers of the family

    def arguments(self, settings: Settings) -> dict[str, Any]:
        """Returns `rope_theta`, and `rope_scaling` and `rotary_fraction` if the family has them."""
        stated = settings.take("rope_parameters", None, dict)
        new = stated if stated is not None else self.absent or {}
        old = settings.take("rope_scaling", {}, dict)
        content, name = (old, "rope_scaling") if old else (new, "rope_parameters")
        kind = content.get("rope_type", content.get("type", "default"))
        own = Settings(content, f"{settings.where}: {name} of type {kind!r:.200}", frozenset())
        own.ignore("rope_type", "type")
        known = ["default", *(name for name, made in _KINDS.items() if made in self.scalings)]
        if kind not in known:
            raise FolderError(f"{own.where} is not supported, only {', '.join(known)}")
        outer = settings.take(self.keys[0], self.theta, float, null=True)
        theta = own.take("rope_theta", outer, float, null=True)
        if theta is None:
            raise FolderError(f"{settings.where}: rope_theta = None is not of type float")
        found = {"rope_theta": theta}
        fraction = self._fraction(settings, own)
        longest = settings.take(_LONGEST, None)
        scaling = _scaling(own, kind, theta, longest, settings.take(_ORIGINAL, None))
        own.done()
        if self.scalings:
            found["rope_scaling"] = scaling
        return found | ({"rotary_fraction": fraction} if self.partial else {})

    def _fraction(self, settings: Settings, own: Settings) -> float:
        key = self.keys[1]
        outside = settings.take(key, None, float)
        inside = own.take("partial_rotary_factor", outside, float)
        if outside not in (None, inside):
            raise FolderError(f"{settings.where}: {key} = {outside}, but {own.where} has {inside}")
        fraction = self.fraction if inside is None else inside
        if fraction > 1 or (fraction < 1 and not self.partial):
            accepted = "shares up to 1.0" if self.partial else "1.0"
            raise FolderError(
                f"{settings.where}: {key} = {fraction} is not supported, only {accepted}"
            )
        return float(fraction)

    def settings(self, rotary: Rotary, head_dim: int) -> dict[str, Any]:
        """Returns the keys that `arguments` reads, in the new and the old format."""
        scaling = rotary.scaling
        new: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.theta}
        content: dict[str, Any] = {self.keys[0]: rotary.theta, "rope_parameters": new}
        if scaling is not None:
            new |= _written(scaling)
            old = {self.kind: new["rope_type"]} | new
            for key in {"rope_type", "rope_theta"} - {self.kind}:
                del old[key]
            if isinstance(scaling, LongRope):  # old readers count the keys
                content[_ORIGINAL] = old.pop(_ORIGINAL)
                content[_LONGEST] = round(scaling.factor * scaling.original)
            if scaling.longest is not None:
                content[_LONGEST] = scaling.longest
            content["rope_scaling"] = old
        if self.partial:
            content[self.keys[1]] = new["partial_rotary_factor"] = fraction_of(rotary, head_dim)
        return content


def fraction_of(rotary: Rotary, head_dim: int) -> float:
    """Returns the fraction of a head's coordinates that `rotary` rotates.

    Readers compute `int(fraction * head_dim)`, and rounding matters: 30 / 44 * 44 is 29.99…
    """
    share = rotary.head_dim / head_dim
    exact = int(share * head_dim) == rotary.head_dim
    return share if exact else math.nextafter(share, 1.0)


def _written(scaling: Any) -> dict[str, Any]:
    kind = next(kind for kind, made in _KINDS.items() if made is type(scaling))
    own = {field.name for field in dataclasses.fields(scaling)}
    values = {key: getattr(scaling, field) for key, field in _FIELDS.items() if field in own}
    if isinstance(scaling, LongRope):
        if scaling.amplitude == long_rope_amplitude(scaling.factor, scaling.original):
            del values["attention_factor"]
        del values["factor"]  # readers compute it from the lengths
        values |= {key: [*values[key]] for key in ("short_factor", "long_factor")}
    return {"rope_type": kind, **values}


def _scaling(
    own: Settings, kind: str, theta: float, longest: int | None, original: int | None
) -> Scaling | None:
    match kind:
        case "linear":
            return Linear(own.take("factor", kind=float))
        case "dynamic":
            if longest is None:
                raise FolderError(f"{own.where} has no {_LONGEST}")
            return Dynamic(own.take("factor", kind=float), longest)
        case "llama3":
            keys = "factor", "low_freq_factor", "high_freq_factor"
            factor, low, high = (own.take(key, kind=float) for key in keys)
            return Llama3(factor, low, high, _original(own, longest, original))
        case "yarn":
            return _yarn(own, theta, longest, original)
        case "longrope":
            return _long_rope(own, longest, original)
    return None


def _original(own: Settings, longest: int | None, original: int | None) -> int:
    """Returns the original training length. `transformers` prefers `original`, the outer value."""
    if original is None:
        return int(own.take(_ORIGINAL) if longest is None else own.take(_ORIGINAL, longest))
    inside = own.take(_ORIGINAL, None) or original
    if inside != original:
        raise FolderError(f"{own.where}: {_ORIGINAL} = {inside}, but outside of it {original}")
    return original


def _long_rope(own: Settings, longest: int | None, original: int | None) -> LongRope:
    if longest is None or original is None:  # else transformers would use its own defaults
        missing = _LONGEST if longest is None else _ORIGINAL
        raise FolderError(f"{own.where}: beside it, the file has no {missing}")
    original = _original(own, longest, original)
    short, long = (own.take(key, kind=list) for key in ("short_factor", "long_factor"))
    if not all(type(factor) in (int, float) for factor in (*short, *long)):
        raise FolderError(f"{own.where}: short_factor and long_factor must be lists of numbers")
    factor = longest / original
    amplitude = long_rope_amplitude(own.take("factor", factor, float), original)
    amplitude = own.take("attention_factor", amplitude, float)
    return LongRope(tuple(short), tuple(long), original, factor, amplitude=amplitude)


def _yarn(own: Settings, theta: float, longest: int | None, original: int | None) -> Yarn:
    original = _original(own, longest, original)
    factor = own.take("factor", kind=float, null=True)
    if factor is None:
        if longest is None:
            raise FolderError(f"{own.where} has neither factor nor {_LONGEST}")
        factor = longest / original
    keys = "mscale", "mscale_all_dim"
    scale, all_scale = (own.take(key, None, float, zero=True) for key in keys)
    amplitude = yarn_amplitude(factor)
    if scale and all_scale:
        amplitude = yarn_amplitude(factor, scale) / yarn_amplitude(factor, all_scale)
    return Yarn(
        factor, theta, original,
        fast=own.take("beta_fast", 32.0, float),
        slow=own.take("beta_slow", 1.0, float),
        amplitude=own.take("attention_factor", amplitude, float),
        whole=bool(own.take("truncate", True, bool, null=True)),
    )  # fmt: skip
