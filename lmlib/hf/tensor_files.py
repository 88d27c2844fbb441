"""Reads and writes safetensors, as one file or several with an index.

A file consists of the header's length in 8 bytes, a JSON header, and the tensors' bytes
(https://github.com/huggingface/safetensors, README, "Format"). Folders are untrusted: the header's
content is checked against the file before anything is read.
"""

import dataclasses
import json
import math
import os
import reprlib
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lmlib.hf.folder import opened, parsed, read_json
from lmlib.models.families.hugging_face.settings import FolderError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Plus dtypes of other tensors: GPT-NeoX's folders contain the causal mask, others packed codes.
_KNOWN = DTYPES | {
    "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8), "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}  # fmt: skip
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_HEADER = 32 << 20  # bytes; the largest models' have 20 MB
_LARGEST_INDEX = 32 << 20
_LONGEST_NAME, _MOST_AXES = 1_000, 32


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file: its dtype and shape, and the offset of its first byte in `file`."""

    file: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.size * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.end - self.offset

    def read(self, start: int, end: int, room: int | None = None) -> np.ndarray:
        """Reads values `start` to `end`, in file order, zero-padded to `room` values.

        Raises FolderError if the file has become shorter.
        """
        values = np.zeros(end - start if room is None else room, self.dtype)
        view = memoryview(values.view(np.uint8))[: (end - start) * self.dtype.itemsize]
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            while view:
                count = file.readinto(view)
                if not count:
                    raise FolderError(f"{self.file} ends early: it was changed while it was read")
                view = view[count:]
        return values


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Returns all tensors of a folder, by name.

    Raises FolderError if there are none, or headers, index and files contradict each other.
    """
    if (folder / INDEX).exists():
        found = _indexed(folder)
        files = {tensor.file.name for tensor in found.values()}
        if (folder / SINGLE).exists() and SINGLE not in files:
            raise FolderError(
                f"{folder} holds {SINGLE}, which transformers reads, and an {INDEX} of other files "
                f"({', '.join(sorted(files)[:2])}, ...): remove one of them"
            )
        return found
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if pickled := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt")):
        raise FolderError(
            f"{pickled[0]} is a pickle, which can run any code and is never read: convert the "
            "folder to safetensors first, with `save_pretrained` of transformers"
        )
    raise FolderError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def tensor_names(folder: Path) -> Collection[str]:
    """Returns the names of a folder's tensors; reads only its index if it has one."""
    if (folder / INDEX).exists():
        names = read_json(folder / INDEX, _LARGEST_INDEX).get("weight_map")
        return names if isinstance(names, dict) else ()
    return read_header(folder / SINGLE) if (folder / SINGLE).exists() else ()


def _indexed(folder: Path) -> dict[str, Stored]:
    index = read_json(folder / INDEX, _LARGEST_INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise FolderError(f"{folder / INDEX} has no weight_map of names to files")
    found: dict[str, Stored] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise FolderError(
                f"{folder / INDEX} names {file!r:.200}, which is not a file in this folder"
            )
        for name, tensor in read_header(folder / file).items():
            if names.get(name) != file:
                raise FolderError(
                    f"{folder / file} holds {name}, but {INDEX} has it in {names.get(name)}"
                )
            found[name] = tensor
    if missing := sorted(set(names) - set(found)):
        raise FolderError(f"{folder / INDEX} names {missing[0]}, which its file does not hold")
    return found


def read_header(path: Path) -> dict[str, Stored]:
    """Returns the tensors of one file, by name.

    Raises FolderError if the header is invalid, or its tensors do not fill the file exactly.
    """
    with opened(path) as file:
        length = os.fstat(file.fileno()).st_size
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= size <= min(_LARGEST_HEADER, length - 8):
            raise FolderError(
                f"{path} is not a safetensors file: its header cannot be {size:,} bytes"
            )
        text = file.read(size)
    header = parsed(path, text)
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, entry) for name, entry in header.items()}
    tensors: dict[str, Stored] = {}
    end = 0
    for name, (first, last, dtype, shape) in sorted(entries.items(), key=lambda each: each[1][:2]):
        if first != end or last - first != math.prod(shape) * dtype.itemsize:
            raise FolderError(f"{path}: the bytes of {name} are not where they should be")
        tensors[name] = Stored(path, 8 + size + first, dtype, shape)
        end = last
    if 8 + size + end != length:
        raise FolderError(
            f"{path} has {length:,} bytes, but its header describes {8 + size + end:,}: it is cut "
            "short, or was not downloaded to its end"
        )
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[int, int, np.dtype, tuple[int, ...]]:
    """Returns the offsets of its first byte and after its last, its dtype and its shape."""
    try:
        kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = len(name) <= _LONGEST_NAME and len(shape) <= _MOST_AXES
        sound = sound and all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, first, last))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise FolderError(
            f"{path}: the header's entry of {name:.80} is damaged: {reprlib.repr(entry)}"
        )
    if not isinstance(kind, str) or kind not in _KNOWN:
        raise FolderError(
            f"{path}: {name} has dtype {reprlib.repr(kind)}; there are {', '.join(DTYPES)}"
        )
    return first, last, _KNOWN[kind], tuple(shape)


def laid_out(
    folder: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    file_bytes: int,
    single: str = SINGLE,
) -> dict[str, Stored]:
    """Plans files for tensors of these dtypes and shapes.

    Files have about `file_bytes` each; if one file is enough, it is named `single`.
    """
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name, (dtype, shape) in tensors.items():
        size = dtype.itemsize * math.prod(shape)
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    placed: dict[str, Stored] = {}
    for number, names in enumerate(groups, 1):
        path = folder / (
            single if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        )
        # Wide values come first, so that each is aligned to its size: readers map the file.
        names.sort(key=lambda name: -tensors[name][0].itemsize)
        offset = len(_header({name: tensors[name] for name in names}))
        for name in names:
            dtype, shape = tensors[name]
            placed[name] = Stored(path, offset, dtype, shape)
            offset += dtype.itemsize * math.prod(shape)
    return placed


def begin_files(tensors: Mapping[str, Stored]) -> None:
    """Creates the files of `tensors`, which `laid_out` planned, in full size and with headers.

    Several files get an index.
    """
    files: dict[Path, dict[str, Stored]] = {}
    for name, tensor in tensors.items():
        files.setdefault(tensor.file, {})[name] = tensor
    for path, held in files.items():
        with open(path, "wb") as file:
            file.write(_header({name: (each.dtype, each.shape) for name, each in held.items()}))
            file.truncate(max(each.end for each in held.values()))
    if len(files) > 1:
        total = sum(each.end - each.offset for each in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: each.file.name for name, each in tensors.items()},
        }
        (next(iter(files)).parent / INDEX).write_text(json.dumps(index, indent=2))


def write(tensor: Stored, start: int, values: np.ndarray) -> None:
    """Writes values into `tensor`, from its value `start` on."""
    with open(tensor.file, "r+b") as file:
        file.seek(tensor.offset + start * tensor.dtype.itemsize)
        file.write(np.ascontiguousarray(values, tensor.dtype).view(np.uint8).data)


def _header(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    names = {dtype: name for name, dtype in _KNOWN.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + dtype.itemsize * math.prod(shape)
        entries[name] = {
            "dtype": names[dtype], "shape": list(shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return struct.pack("<Q", len(text)) + text
