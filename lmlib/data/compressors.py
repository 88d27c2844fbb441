"""Compressed lengths of a split's texts, for comparison with a model's bits per byte.

They are measured while the texts are available, and stored beside the shards in compressors.json,
bytes by code name. The lengths under gzip are in the shards' metadata.
"""

import importlib.util
import json
import lzma
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from lmlib.data.stored.metadata import DamagedDataError
from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.stored_json import read_json

FILE_NAME = "compressors.json"
GZIP = "gzip -9 of each text"
_ORDER = 16  # PPMd's context length in bytes
_PPMD = f"PPMd of order {_ORDER} of the whole text"
_TRAINED_PPMD = f"PPMd of order {_ORDER} after the training text"
_MEMORY = 1 << 30  # PPMd's memory limit in bytes; it takes 300 MB after 10 MB of text
_Code = Callable[[Sequence[bytes], Sequence[bytes]], int]


def saw_training_text(code: str) -> bool:
    """True if the code with this name had read the training text before."""
    return code == _TRAINED_PPMD


def available() -> tuple[str, ...]:
    """Returns the codes that can be measured here; PPMd's need pyppmd, from lmlib[compressors]."""
    return tuple(_CODES if importlib.util.find_spec("pyppmd") else _WITHOUT_PPMD)


def measure(
    texts: Iterable[str],
    training: Iterable[str],
    codes: Iterable[str] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, int]:
    """Returns the compressed bytes of `texts` by code name, for `codes` or all `available` ones.

    "After the training text" means the growth of its code by these texts. `report` is called with
    the name of each code before it runs.
    """
    encoded, training_encoded = [[each.encode() for each in of] for of in (texts, training)]
    found = {}
    for code in available() if codes is None else codes:
        report(code)
        found[code] = _CODES[code](encoded, training_encoded)
    return found


def save(folder: Path, measured: Mapping[str, int]) -> None:
    """Stores the lengths with the shards in `folder`."""
    write_atomically(folder / FILE_NAME, json.dumps(dict(measured), indent=2) + "\n")


def read(folder: Path) -> dict[str, int]:
    """Returns the lengths that `save` stored in `folder`; empty if there are none.

    Raises DamagedDataError if the file is damaged.
    """
    file = folder / FILE_NAME
    if not file.exists():
        return {}
    try:
        content = read_json(file)
        if not all(type(length) is int and length > 0 for length in content.values()):
            raise ValueError("it does not hold lengths in bytes")
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedDataError(f"{file} cannot be read: {error}; remove it") from error
    return {code: length for code, length in content.items() if code in _CODES}


def _xz(text: bytes) -> int:
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def _ppmd(texts: Sequence[bytes], before: Sequence[bytes]) -> int:
    """Returns the length under PPMd, variant H, as in 7-Zip.

    Shkarin 2002, "PPM: one step to practicality".
    """
    from pyppmd import Ppmd7Encoder

    encoder = Ppmd7Encoder(_ORDER, _MEMORY)
    encoder.encode(b"".join(before))
    return len(encoder.encode(b"".join(texts))) + len(encoder.flush())


_WITHOUT_PPMD: dict[str, _Code] = {
    "xz -9e of each text": lambda texts, _: sum(map(_xz, texts)),
    "xz -9e of the whole text": lambda texts, _: _xz(b"".join(texts)),
}
_CODES = {**_WITHOUT_PPMD, _PPMD: lambda texts, _: _ppmd(texts, ()), _TRAINED_PPMD: _ppmd}
