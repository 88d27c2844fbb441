"""Damage to files, by disks and people."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from fault_injection.kinds import CHUNK
from lmlib.checkpoint.manifest import MANIFEST, NOT_COVERED

# Given a checkpoint, or a folder of tokens: harms it, and returns the file, or the folder of an
# array, that must be found damaged.
Harm = Callable[[Path, Random], Path]

BLOCK = 4_096  # bytes
CHUNK_BYTES = 2 * CHUNK + 4  # of tokens on disk, with the checksum


def flip_a_bit(checkpoint: Path, random: Random) -> Path:
    file, _ = _any_file(checkpoint, random)
    return _flip_a_bit(file, random)


def zero_a_block(checkpoint: Path, random: Random) -> Path:
    while True:
        file, content = _any_file(checkpoint, random)
        begin = random.randrange(len(content)) // BLOCK * BLOCK
        end = min(begin + BLOCK, len(content))
        if any(content[begin:end]):
            content[begin:end] = bytes(end - begin)
            file.write_bytes(content)
            return file


def truncate(checkpoint: Path, random: Random) -> Path:
    file, content = _any_file(checkpoint, random)
    file.write_bytes(content[: random.randrange(len(content))])
    return file


def delete(checkpoint: Path, random: Random) -> Path:
    file, _ = _any_file(checkpoint, random)
    file.unlink()
    return file


def delete_the_manifest(checkpoint: Path, random: Random) -> Path:
    file = checkpoint / MANIFEST
    file.unlink()
    return file


def add_a_stray_file(checkpoint: Path, random: Random) -> Path:
    folder = random.choice([path for path in sorted(checkpoint.rglob("*")) if path.is_dir()])
    file = folder / "stray"
    file.write_bytes(random.randbytes(random.randrange(100)))
    return file


def cut_the_last_line(workdir: Path, random: Random) -> None:
    """Leaves half a line at the end of metrics.jsonl, like a power cut."""
    with (workdir / "metrics.jsonl").open("ab") as file:
        line = b'{"step": 1000000, "loss": 3.25, "grad_norm": 1.5'
        file.write(line[: random.randrange(1, len(line))])


def leave_half_a_config(workdir: Path, random: Random) -> None:
    """Leaves half a config, like a kill while it is written."""
    content = (workdir / "config.json").read_bytes()
    half = content[: random.randrange(len(content))]
    (workdir / ".config.json.0123456789abcdef.unfinished").write_bytes(half)


def swap_shards(tokens: Path, random: Random) -> Path:
    """Swaps the tokens of two shards of a split. Each file by itself is sound."""
    first, second = random.sample(_shards(tokens, random), 2)
    content = _tokens_of(first).read_bytes()
    _tokens_of(first).write_bytes(_tokens_of(second).read_bytes())
    _tokens_of(second).write_bytes(content)
    return first.parent


def swap_chunks(tokens: Path, random: Random) -> Path:
    """The first two chunks of a file of tokens, each with its checksum."""
    shard = random.choice(_shards(tokens, random))
    content = _tokens_of(shard).read_bytes()
    first, second = content[:CHUNK_BYTES], content[CHUNK_BYTES : 2 * CHUNK_BYTES]
    _tokens_of(shard).write_bytes(second + first + content[2 * CHUNK_BYTES :])
    return shard / "tokens"


def flip_a_bit_of_metadata(tokens: Path, random: Random) -> Path:
    return _flip_a_bit(random.choice(_shards(tokens, random)) / "metadata.json", random)


def _shards(tokens: Path, random: Random) -> list[Path]:
    """Those of one split."""
    return sorted(random.choice(sorted(tokens.iterdir())).iterdir())


def _tokens_of(shard: Path) -> Path:
    """Its first file of tokens."""
    return shard / "tokens" / "c" / "0"


def _flip_a_bit(file: Path, random: Random) -> Path:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    return file


def _any_file(checkpoint: Path, random: Random) -> tuple[Path, bytearray]:
    """A file that is not empty and that counts, and its bytes."""
    files = [
        file
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file()
        and file.stat().st_size > 0
        and str(file.relative_to(checkpoint)) not in NOT_COVERED - {MANIFEST}
    ]
    file = random.choice(files)
    return file, bytearray(file.read_bytes())
