"""Names for the points of a sweep by the settings that differ: `peak_lr=0.001,seed=0`."""

import collections
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence

Settings = Mapping[str, str]  # paths of parameters to literals, as text

LONGEST = 100  # characters; a file system takes 255, and a path of folders less
_DIGEST = 8
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+-]*")


def names_of(points: Sequence[Settings], taken: Iterable[str] = ()) -> list[str]:
    """A name for each of `points`, which are all different: safe for file systems, also where
    capitals equal small letters, and none of `taken`. Other points change a point's name only where
    two names would be equal."""
    labels = _labels({path for point in points for path in point})
    names = [_name(point, labels) for point in points]
    count = collections.Counter(name.casefold() for name in [*names, *taken])
    return [
        _with_digest(name, point) if count[name.casefold()] > 1 else name
        for name, point in zip(names, points, strict=True)
    ]


def is_safe(name: str) -> bool:
    """Is `name` one that `names_of` could give?"""
    return len(name) <= LONGEST and _SAFE.fullmatch(name) is not None


def _name(point: Settings, labels: Mapping[str, str]) -> str:
    if not point:
        return "base"
    name = ",".join(f"{labels[path]}={_safe(value)}" for path, value in point.items())
    return name if len(name) <= LONGEST else _with_digest(name, point)


def _labels(paths: set[str]) -> dict[str, str]:
    """For each path as many of its last parts as it takes to differ from all others."""
    found = {}
    for path in paths:
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            end = parts[-count:]
            if sum(other.split(".")[-count:] == end for other in paths) == 1:
                break
        found[path] = _safe(".".join(parts[-count:]))
    return found


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", text.strip("'\"")).strip("_") or "_"


def _with_digest(name: str, point: Settings) -> str:
    written = json.dumps(sorted(point.items())).encode()
    digest = hashlib.sha256(written).hexdigest()[:_DIGEST]
    return f"{name[: LONGEST - _DIGEST - 1]}-{digest}"
