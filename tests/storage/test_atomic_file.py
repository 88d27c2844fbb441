"""Files written whole, by failures and by two writers; test_durability.py has the calls' order."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmlib.storage.atomic_file import write_atomically

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("inodes", "left", "told"),
    [
        (50, 0, r"takes no more files, all 50 inodes are in use and 40,960 bytes are free: delete"),
        (50, 7, "the disk is full, 40,960 bytes are free: make room there"),
        (0, 0, "the disk is full, 40,960 bytes are free"),  # like btrfs, which lacks such a limit
    ],
)
def test_a_file_system_without_inodes_is_not_called_full(tmp_path, monkeypatch, inodes, left, told):
    system = os.statvfs_result((4_096, 4_096, 100, 10, 10, inodes, left, left, 0, 255))

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "statvfs", lambda path: system)
    with pytest.raises(OSError, match=rf"cannot write {tmp_path}/file: .*{told}"):
        write_atomically(tmp_path / "file", b"new")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_after_a_failure_the_old_file_is_there_and_nothing_else(tmp_path, monkeypatch, call):
    file = tmp_path / "file"
    write_atomically(file, b"old")

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=rf"cannot write {file}: the disk is full, .* make room"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_absent_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        write_atomically(tmp_path / "absent" / "file", b"new")


WRITE_OFTEN = """
import sys
from lmlib.storage.atomic_file import write_atomically

for _ in range(30):
    write_atomically(sys.argv[1], sys.argv[2].encode() * (1 << 20))
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_writers_at_once_leave_a_whole_file_at_every_moment(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, b"a" * (1 << 20))
    children = [start(WRITE_OFTEN, str(file), letter) for letter in "ab"]
    while any(child.poll() is None for child in children):
        content = file.read_bytes()
        assert content in (b"a" * (1 << 20), b"b" * (1 << 20))
    for child in children:
        assert child.wait() == 0, child.communicate()[1]
    assert os.listdir(tmp_path) == ["file"]
