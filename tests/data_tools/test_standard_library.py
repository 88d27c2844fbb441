import gzip
import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest

from data_tools.made_whole import made_whole
from data_tools.standard_library import standard_library
from data_tools.tokenizer import load_tokenizer
from lmlib.data import FlatTokens

MAX_BYTES = 300_000


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache: Path) -> Path:
    return Path(standard_library(vocab_size=300, max_bytes=MAX_BYTES, cache=str(cache)))


def documents_of(folder: Path, split: str) -> list[str]:
    """The texts of a split, decoded from its tokens."""
    source = FlatTokens(str(folder), split, 1, 4096, seed=None)
    batches = [source.batch(step) for step in range(source.steps_per_epoch)]
    targets = np.concatenate([batch.targets[batch.segment_ids > 0] for batch in batches])
    ends = np.flatnonzero(targets == source.metadata.eos_id)
    tokenizer = load_tokenizer(str(folder))
    return [tokenizer.decode(ids.tolist()) for ids in np.split(targets, ends + 1)[:-1]]


def expected_documents() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [
        file for file in root.rglob("*.py") if not left_out & set(file.parts[len(root.parts) :])
    ]
    texts: list[str] = []
    total = 0
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        total += len(text.encode())
        if total > MAX_BYTES:
            break
        texts += [text] if text else []
    return texts


def test_every_tenth_file_is_held_out(folder: Path) -> None:
    expected = expected_documents()
    assert len(expected) > 10
    assert documents_of(folder, "validation") == expected[::10]
    assert documents_of(folder, "train") == [t for i, t in enumerate(expected) if i % 10]


def test_gzip_covers_the_held_out_bytes(folder: Path) -> None:
    metadata = FlatTokens(str(folder), "validation", 1, 8).metadata
    held_out = [text.encode() for text in expected_documents()[::10]]
    assert metadata.bytes == sum(map(len, held_out))
    assert metadata.gzip_bytes == sum(len(gzip.compress(text, 9)) for text in held_out)
    assert metadata.vocab_size == 300


def test_it_is_made_once_for_each_setting(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = (folder / "train" / "shard_00000_of_00001" / "metadata.json").stat().st_mtime_ns
    capsys.readouterr()
    again = standard_library(vocab_size=300, max_bytes=MAX_BYTES, cache=str(cache))
    assert Path(again) == folder
    assert capsys.readouterr().err == ""
    assert (folder / "train" / "shard_00000_of_00001" / "metadata.json").stat().st_mtime_ns == made
    assert list(cache.iterdir()) == [folder]  # nothing left behind

    other = Path(standard_library(vocab_size=301, max_bytes=MAX_BYTES, cache=str(cache)))
    assert other != folder


def test_what_a_killed_process_left_is_removed(folder: Path, cache: Path) -> None:
    left = cache / f"{folder.name}.making-killed"
    (left / "train").mkdir(parents=True)
    with made_whole(folder) as making:  # as another process
        standard_library(vocab_size=300, max_bytes=MAX_BYTES, cache=str(cache))
        assert making.is_dir() and not left.exists()
    assert not making.exists()


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(standard_library(vocab_size=258, max_bytes=50_000))
    assert folder.parent == tmp_path / "lmlib"


@pytest.mark.parametrize("cache_home", ["/proc/nowhere", "/dev/null"])
def test_without_a_cache_it_goes_to_a_temporary_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache_home: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(standard_library(vocab_size=258, max_bytes=50_000))
    assert folder.parent == tmp_path / f"lmlib-{os.getuid()}"
    assert f"{cache_home}/lmlib cannot be written" in capsys.readouterr().err
    assert standard_library(vocab_size=258, max_bytes=50_000) == str(folder)


def test_too_little_to_hold_anything_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes=10 leaves"):
        standard_library(vocab_size=300, max_bytes=10, cache=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
