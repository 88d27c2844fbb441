"""Lengths of the texts of a split under compressors, beside a model's bits per byte.

The lengths are measured once, where the texts are at hand, and kept beside the split's shards in
compressors.json, an object of codes' names and their bytes. Those of gzip are in the shards'
metadata, since the processes that encode texts measure them.
"""

import importlib.util
import json
import lzma
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from lmlib.data.stored.metadata import DamagedDataError
from lmlib.storage.stored_json import read_json
from lmlib.storage.whole_file import write_whole

FILE_NAME = "compressors.json"
GZIP = "gzip -9 of each text"
_ORDER = 16  # bytes of PPMd's context
_PPMD = f"PPMd of order {_ORDER} of the whole text"
_TRAINED_PPMD = f"PPMd of order {_ORDER} after the training text"
_MEMORY = 1 << 30  # bytes that PPMd may take before it forgets; it takes 300 MB after 10 MB of text
_Code = Callable[[Sequence[bytes], Sequence[bytes]], int]


def saw_training_text(code: str) -> bool:
    """True if the code of this name had read the training text before."""
    return code == _TRAINED_PPMD


def available() -> tuple[str, ...]:
    """The codes that can be measured here, by name; PPMd's need pyppmd, of lmlib[compressors]."""
    return tuple(_CODES if importlib.util.find_spec("pyppmd") else _WITHOUT_PPMD)


def measure(
    texts: Iterable[str],
    training: Iterable[str],
    codes: Iterable[str] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, int]:
    """Bytes of `texts` by the name of the code, of all that are `available` or of these.

    A whole text is one text after the other. After the training text means how much longer its
    code grows by theirs. `report` gets the name of each code before it is made.
    """
    encoded, training_encoded = [[each.encode() for each in of] for of in (texts, training)]
    found = {}
    for code in available() if codes is None else codes:
        report(code)
        found[code] = _CODES[code](encoded, training_encoded)
    return found


def save(folder: Path, measured: Mapping[str, int]) -> None:
    """Keeps the lengths beside the shards in `folder`."""
    write_whole(folder / FILE_NAME, json.dumps(dict(measured), indent=2) + "\n")


def read(folder: Path) -> dict[str, int]:
    """The lengths that `save` kept in `folder`; empty if it was never called.

    Raises DamagedDataError if it is damaged.
    """
    file = folder / FILE_NAME
    if not file.exists():
        return {}
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise DamagedDataError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(
        type(length) is int and length > 0 for length in content.values()
    ):
        raise DamagedDataError(f"{file} does not hold lengths in bytes: remove it")
    return {code: length for code, length in content.items() if code in _CODES}


def _xz(text: bytes) -> int:
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def _ppmd(texts: Sequence[bytes], before: Sequence[bytes]) -> int:
    """PPMd, variant H (Shkarin 2002, "PPM: one step to practicality"), as 7-Zip has it."""
    from pyppmd import Ppmd7Encoder

    encoder = Ppmd7Encoder(_ORDER, _MEMORY)
    encoder.encode(b"".join(before))
    return len(encoder.encode(b"".join(texts))) + len(encoder.flush())


_WITHOUT_PPMD: dict[str, _Code] = {
    "xz -9e of each text": lambda texts, _: sum(map(_xz, texts)),
    "xz -9e of the whole text": lambda texts, _: _xz(b"".join(texts)),
}
_CODES = {**_WITHOUT_PPMD, _PPMD: lambda texts, _: _ppmd(texts, ()), _TRAINED_PPMD: _ppmd}
