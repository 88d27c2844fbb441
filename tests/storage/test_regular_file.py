"""Only files that are stored are opened, and only in the folder that they came in."""

import os
import socket
from pathlib import Path

import pytest

from lmlib.storage.unlinked import check_within_folder, open_regular, read_regular


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"content"
    assert read_regular(tmp_path / "file", 7) == b"content"
    with pytest.raises(ValueError, match="it has more than 6 bytes"):
        read_regular(tmp_path / "file", 6)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket"])
def test_what_is_not_stored_is_neither_read_nor_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(path))  # of a path there may be a hundred bytes
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((ValueError, OSError), match=r"not a regular file|No such device"):
        open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before


CACHED = "cache/models--someone--model/snapshots/a1b2"


@pytest.mark.parametrize(
    ("file", "target", "accepted"),
    [
        ("folder/file", None, True),
        ("folder/file", "other", True),
        ("folder/file", "../folder/within/other", True),
        ("folder/file", "../outside", False),
        ("folder/file", "../folder 2/file", False),
        ("folder/file", "/dev/zero", False),
        ("folder/file", "..", False),
        ("folder/file", ".", False),
        (f"{CACHED}/file", "../../blobs/digest", True),
        (f"{CACHED}/file", "../c3d4/file", True),
        (f"{CACHED}/file", "../../../models--someone--other/blobs/digest", False),
        (f"{CACHED}/file", "../../../../outside", False),
        (f"{CACHED}/file", "../../blobs/to_outside", False),
        # What looks like the cache is trusted no further than its own repository.
        ("folder/snapshots/a1b2/file", "../../blobs/digest", False),
        ("models--a--b/file", "../outside", False),
        ("models--a--b/snapshots/file", "../../outside", False),
    ],
)
def test_a_link_may_not_leave_its_folder(
    tmp_path: Path, file: str, target: str | None, accepted: bool
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    if target is None:
        path.write_text("")
    else:
        path.symlink_to(target)
    (tmp_path / CACHED).parents[1].joinpath("blobs").mkdir(parents=True)
    (tmp_path / CACHED).parents[1].joinpath("blobs/to_outside").symlink_to("../../../outside")
    (tmp_path / "linked").symlink_to(path.parent)  # the folder itself may be one
    for given in (path, tmp_path / "linked" / path.name):
        if accepted:
            check_within_folder(given)
        else:
            with pytest.raises(
                ValueError, match=r"it is a link to /.*, which is not in its folder"
            ):
                check_within_folder(given)
