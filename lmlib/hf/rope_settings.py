"""Rotary positions in a config.json, in and out.

Old files have `rope_theta` and `rope_scaling`, new ones `rope_parameters` with all of it. Where
both are there, `transformers` reads `rope_scaling` alone, and so does this. What is written has
both, for readers that know one of them.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lmlib.hf.folder import FolderError
from lmlib.hf.settings import Settings
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

_ORIGINAL = "original_max_position_embeddings"
_KINDS = {
    "linear": Linear,
    "dynamic": Dynamic,
    "llama3": Llama3,
    "yarn": Yarn,
    "longrope": LongRope,
}


class Rope(NamedTuple):
    """Base of the wavelengths, what changes them for longer sequences, and which share of a head's
    coordinates is rotated."""

    theta: float
    scaling: Scaling | None
    rotary_fraction: float


def read_rope(
    settings: Settings,
    theta: float | None = 10_000.0,
    scalings: tuple[type, ...] = (Linear, Dynamic, Llama3, Yarn),
    partial: bool = False,
    fraction: float = 1.0,
    keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    absent: Mapping[str, Any] | None = None,
) -> Rope:
    """Rotary positions, as old and new files write them.

    Args:
      theta: where they do not say; `None` is refused there.
      scalings: that the family has.
      partial: whether the family can turn a share of a head's coordinates.
      fraction: that share, where they do not say.
      keys: of the base and the share outside of `rope_parameters`.
      absent: `rope_parameters` of a file without, or with null; `None`: they are empty.

    Raises:
      FolderError: if they say something else, or contradict themselves.
    """
    stated = settings.take("rope_parameters", None, dict)
    new = stated if stated is not None else absent or {}
    old = settings.take("rope_scaling", {}, dict)
    content, name = (old, "rope_scaling") if old else (new, "rope_parameters")
    kind = content.get("rope_type", content.get("type", "default"))
    own = Settings(content, f"{settings.where}: {name} of type {kind!r:.200}", frozenset())
    own.ignore("rope_type", "type")
    known = ["default", *(name for name, made in _KINDS.items() if made in scalings)]
    if kind not in known:
        raise FolderError(f"{own.where} is not supported, only {', '.join(known)}")
    base = own.nullable("rope_theta", settings.nullable(keys[0], theta, float), float)
    if base is None:
        raise FolderError(f"{settings.where}: rope_theta = None is no float")
    fraction = _rotary_fraction(settings, own, partial, fraction, keys[1])
    longest, original = (
        settings.take("max_position_embeddings", None),
        settings.take(_ORIGINAL, None),
    )
    scaling = _scaling(own, kind, base, longest, original)
    own.done()
    return Rope(base, scaling, fraction)


def _rotary_fraction(
    settings: Settings, own: Settings, partial: bool, default: float, key: str
) -> float:
    outside = settings.take(key, None, float)
    inside = own.take("partial_rotary_factor", outside, float)
    if outside not in (None, inside):
        raise FolderError(f"{settings.where}: {key} = {outside}, but {own.where} has {inside}")
    fraction = default if inside is None else inside
    if fraction > 1 or (fraction < 1 and not partial):
        accepted = "shares up to 1.0" if partial else "1.0"
        raise FolderError(f"{settings.where}: {key} = {fraction} is not supported, only {accepted}")
    return fraction


def rotary_fraction_of(rotary: Rotary | None, head_dim: int) -> float:
    """Of a head's coordinates; `int(share * head_dim)` is the number that `rotary` rotates, as
    readers compute it: 30 / 44 * 44 is 29.99…"""
    if rotary is None:
        return 1.0
    share = rotary.head_dim / head_dim
    exact = int(share * head_dim) == rotary.head_dim
    return share if exact else math.nextafter(share, 1.0)


def _scaling(
    own: Settings, kind: str, theta: float, longest: int | None, original: int | None
) -> Scaling | None:
    match kind:
        case "linear":
            return Linear(own.take("factor", kind=float))
        case "dynamic":
            if longest is None:
                raise FolderError(f"{own.where} has no max_position_embeddings")
            return Dynamic(own.take("factor", kind=float), longest)
        case "llama3":
            return Llama3(
                own.take("factor", kind=float),
                own.take("low_freq_factor", kind=float),
                own.take("high_freq_factor", kind=float),
                _original(own, longest, original),
            )
        case "yarn":
            return _yarn(own, theta, longest, original)
        case "longrope":
            return _long_rope(own, longest, original)
    return None


def _original(own: Settings, longest: int | None, original: int | None) -> int:
    """Positions of the training before. `original`: what stands outside, which `transformers`
    prefers."""
    if original is None:
        return own.take(_ORIGINAL) if longest is None else own.take(_ORIGINAL, longest)
    inside = own.take(_ORIGINAL, None) or original
    if inside != original:
        raise FolderError(f"{own.where}: {_ORIGINAL} = {inside}, but outside of it {original}")
    return original


def _long_rope(own: Settings, longest: int | None, original: int | None) -> LongRope:
    if longest is None or original is None:  # transformers would take numbers of its own
        missing = "max_position_embeddings" if longest is None else _ORIGINAL
        raise FolderError(f"{own.where}: beside it, the file has no {missing}")
    original = _original(own, longest, original)
    short, long = (own.take(key, kind=list) for key in ("short_factor", "long_factor"))
    if not all(type(factor) in (int, float) for factor in (*short, *long)):
        raise FolderError(f"{own.where}: short_factor and long_factor must be lists of numbers")
    factor = longest / original
    amplitude = long_rope_amplitude(own.take("factor", factor, float), original)
    return LongRope(
        tuple(short), tuple(long), original, factor,
        amplitude=own.take("attention_factor", amplitude, float),
    )  # fmt: skip


def _yarn(own: Settings, theta: float, longest: int | None, original: int | None) -> Yarn:
    original = _original(own, longest, original)
    factor = own.nullable("factor", kind=float)
    if factor is None:
        if longest is None:
            raise FolderError(f"{own.where} has neither factor nor max_position_embeddings")
        factor = longest / original
    scale, all_scale = (
        own.take(key, None, float, zero=True) for key in ("mscale", "mscale_all_dim")
    )
    amplitude = yarn_amplitude(factor)
    if scale and all_scale:
        amplitude = yarn_amplitude(factor, scale) / yarn_amplitude(factor, all_scale)
    return Yarn(
        factor, theta, original,
        fast=own.take("beta_fast", 32.0, float),
        slow=own.take("beta_slow", 1.0, float),
        amplitude=own.take("attention_factor", amplitude, float),
        whole=bool(own.nullable("truncate", True, bool)),
    )  # fmt: skip


def write_rope(rotary: Rotary, kind: str = "rope_type") -> dict[str, Any]:
    """What `read_rope` reads, as new and as old files write it, and the lengths it depends on.

    Args:
      kind: under which key old readers of the family look for the type of scaling.
    """
    scaling = rotary.scaling
    new = rope_parameters(rotary.theta, scaling)
    content: dict[str, Any] = {"rope_theta": rotary.theta, "rope_parameters": new}
    if scaling is None:
        return content
    old = {kind: new["rope_type"]} | new
    for key in {"rope_type", "rope_theta"} - {kind}:
        del old[key]
    if isinstance(scaling, LongRope):  # old readers count the keys
        content[_ORIGINAL] = old.pop(_ORIGINAL)
        content["max_position_embeddings"] = round(scaling.factor * scaling.original)
    if scaling.longest is not None:
        content["max_position_embeddings"] = scaling.longest
    return content | {"rope_scaling": old}


def rope_parameters(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """The new spelling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    if isinstance(scaling, Linear | Dynamic):
        kind = type(scaling).__name__.lower()
        return {"rope_type": kind, "rope_theta": theta, "factor": scaling.factor}
    if isinstance(scaling, Llama3):
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original,
        }
    if isinstance(scaling, LongRope):
        usual = long_rope_amplitude(scaling.factor, scaling.original)
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            _ORIGINAL: scaling.original,
            **({} if scaling.amplitude == usual else {"attention_factor": scaling.amplitude}),
        }
    assert isinstance(scaling, Yarn)
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.fast,
        "beta_slow": scaling.slow,
        "attention_factor": scaling.amplitude,
        "truncate": scaling.whole,
    }
