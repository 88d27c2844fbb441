"""New digests of a shard that a test has changed, so that only other checks can notice."""

import contextlib
import json
from pathlib import Path

import zarr

from lmlib.data.stored.metadata import digest
from lmlib.data.stored.token_arrays import CHUNK_DIGESTS, digest_of_array, digests_of_chunks
from lmlib.storage.stored_json import parse_json

LARGEST = 1_000_000  # elements, or bytes


def sign(shard: Path) -> None:
    """Sets the digests of the shard to match its arrays and metadata, if the test can read them."""
    file = shard / "metadata.json"
    if any(path.stat().st_size > LARGEST for path in shard.rglob("*") if path.is_file()):
        return
    try:
        content = parse_json(file.read_text())
        content.pop("digest")
    except (ValueError, KeyError, AttributeError):
        return
    for name in content["digests"]:
        with contextlib.suppress(Exception):  # an array that cannot be read
            array = zarr.open_array(shard / name, mode="r")
            if max(array.size, array.chunks[0]) < LARGEST:
                found = digests_of_chunks(array[:], array.chunks[0])
                (shard / name / CHUNK_DIGESTS).write_bytes(found.astype("<u8").tobytes())
        with contextlib.suppress(OSError):
            content["digests"][name] = digest_of_array(shard / name)
    before = json.dumps(content, indent=2).removesuffix("\n}") + ",\n"
    file.write_text(f'{before}  "digest": "{digest(before.encode())}"\n}}\n')
