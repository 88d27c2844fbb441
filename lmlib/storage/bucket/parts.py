"""Files that grow, in a bucket, where nothing is appended to: a whole object, and numbered parts.

The file `metrics.jsonl` is the object of that name as it was sent first, and then, one after the
other, `metrics.jsonl.parts/<text>/<number>-<offset>`: each replaces what is from its offset on. The
text is a digest of the whole object, so parts never follow another one than that which they were
made for, whenever a process is killed.
"""

import re

import xxhash

from lmlib.storage.bucket.store import BucketStore

FOLDER = ".parts"
_PART = re.compile(r"(\d+)-(\d+)")


def part_name(name: str, whole: bytes, number: int, offset: int) -> str:
    """The object that has what a file holds from `offset` on."""
    return f"{name}{FOLDER}/{_digest(whole)}/{number:08}-{offset}"


def file_of(object_name: str) -> str:
    """The file that an object is the whole of, or a part."""
    return re.sub(rf"{re.escape(FOLDER)}/[0-9a-f]+/{_PART.pattern}", "", object_name)


def put_together(store: BucketStore, name: str, parts: list[str]) -> bytes:
    """What the file `name` holds, by its whole object and the names of all its `parts`."""
    whole = content = store.read(name)
    prefix = f"{name}{FOLDER}/{_digest(whole)}/"
    for part in sorted(part for part in parts if part.startswith(prefix)):
        match = _PART.fullmatch(part.removeprefix(prefix))
        if match is not None:
            content = content[: int(match[2])] + store.read(part)
    return content


def _digest(whole: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(whole)
