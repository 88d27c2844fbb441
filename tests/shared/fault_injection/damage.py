"""What disks and people do to files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from lmlib.checkpoint.manifest import MANIFEST, NOT_COVERED

# Given a checkpoint: harms it, and returns the file in it that must be found damaged.
Harm = Callable[[Path, Random], Path]

BLOCK = 4_096  # bytes


def flip_a_bit(checkpoint: Path, random: Random) -> Path:
    file, content = _any_file(checkpoint, random)
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    return file


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
    """As a power cut does: half a line at the end of metrics.jsonl."""
    with (workdir / "metrics.jsonl").open("ab") as file:
        line = b'{"step": 1000000, "loss": 3.25, "grad_norm": 1.5'
        file.write(line[: random.randrange(1, len(line))])


def delete_tensorboard(workdir: Path, random: Random) -> None:
    shutil.rmtree(workdir / "tensorboard")


def leave_half_a_config(workdir: Path, random: Random) -> None:
    """As a kill does that comes while the config is written."""
    content = (workdir / "config.json").read_bytes()
    half = content[: random.randrange(len(content))]
    (workdir / ".config.json.0123456789abcdef.unfinished").write_bytes(half)


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
