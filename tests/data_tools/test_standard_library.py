import gzip
import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest

from data_tools.standard_library import made_whole, sources, standard_library
from data_tools.tokenizer import load_tokenizer
from lmlib.data import compressors
from lmlib.data.flat_tokens import FlatTokens

MAX_BYTES = 300_000


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache):
    return Path(standard_library(vocab_size=300, max_bytes=MAX_BYTES, cache=str(cache)))


def documents_of(folder, split):
    """The texts of a split, decoded from its tokens."""
    source = FlatTokens(str(folder), split, 1, 4096, seed=None)
    batches = [source.batch(step) for step in range(source.steps_per_epoch)]
    targets = np.concatenate([batch.targets[batch.segment_ids > 0] for batch in batches])
    ends = np.flatnonzero(targets == source.metadata.eos_id)
    tokenizer = load_tokenizer(str(folder))
    return [tokenizer.decode(ids.tolist()) for ids in np.split(targets, ends + 1)[:-1]]


def expected_documents():
    """Returns the texts for training, and the held-out ones."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    splits = [], []
    left = [MAX_BYTES - MAX_BYTES // 10, MAX_BYTES // 10]
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        folders = file.relative_to(root).parts[:-1]
        if left_out & set(folders) or folders[:1] in [("encodings",), ("pydoc_data",)]:
            continue
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        held_out = folders[:1] in [("email",), ("http",), ("urllib",), ("xml",)]
        size = len(text.encode())
        if 0 < size <= left[held_out]:
            left[held_out] -= size
            splits[held_out].append(text)
    return splits


def test_whole_packages_are_held_out(folder):
    train, held_out = expected_documents()
    assert len(train) > 10 and len(held_out) > 3
    assert documents_of(folder, "train") == train
    assert documents_of(folder, "validation") == held_out


def test_the_splits_share_no_package():
    train, held_out = sources()
    assert 900_000 < sum(len(text.encode()) for text in held_out.values()) < 1_200_000
    assert {path.partition("/")[0] for path in held_out} == {"email", "http", "urllib", "xml"}
    elsewhere = {"email", "http", "urllib", "xml", "encodings", "pydoc_data"}
    assert not {path.partition("/")[0] for path in train} & elsewhere


def test_compressors_are_measured_on_the_held_out_bytes(folder):
    source = FlatTokens(str(folder), "validation", 1, 8)
    held_out = [text.encode() for text in expected_documents()[1]]
    size = sum(map(len, held_out))
    assert source.metadata.bytes == size
    assert source.metadata.vocab_size == 300
    found = source.compressed_bits_per_byte
    gzipped = sum(len(gzip.compress(text, 9)) for text in held_out)
    assert found["gzip -9 of each text"] == 8 * gzipped / size
    assert found.keys() == {"gzip -9 of each text", *compressors.available()}
    assert not FlatTokens(str(folder), "train", 1, 8).compressed_bits_per_byte


def test_a_compressor_that_comes_later_is_measured_then(folder, cache, capsys):
    before = compressors.read(folder / "validation")
    xz = "xz -9e of the whole text"
    left = {code: length for code, length in before.items() if code != xz}
    compressors.save(folder / "validation", left)
    capsys.readouterr()
    standard_library(vocab_size=300, max_bytes=MAX_BYTES, cache=str(cache))
    assert f"measuring {xz}" in capsys.readouterr().err
    assert compressors.read(folder / "validation") == before


@pytest.mark.landing
def test_it_is_made_once_for_each_setting(folder, cache, capsys):
    made = (folder / "train" / "shard_00000_of_00001" / "metadata.json").stat().st_mtime_ns
    capsys.readouterr()
    again = standard_library(vocab_size=300, max_bytes=MAX_BYTES, cache=str(cache))
    assert Path(again) == folder
    assert capsys.readouterr().err == ""
    assert (folder / "train" / "shard_00000_of_00001" / "metadata.json").stat().st_mtime_ns == made
    assert list(cache.iterdir()) == [folder]  # nothing left behind

    other = Path(standard_library(vocab_size=301, max_bytes=MAX_BYTES, cache=str(cache)))
    assert other != folder


def test_leftovers_of_a_killed_process_are_removed(folder, cache):
    left = cache / f"{folder.name}.making-killed"
    (left / "train").mkdir(parents=True)
    os.utime(left, (0, 0))  # long ago
    with made_whole(folder) as making, made_whole(folder):  # as two processes
        assert making.is_dir() and not left.exists()
    assert not making.exists()


@pytest.mark.parametrize("cache_home", ["/proc/nowhere", "/dev/null"])
def test_without_a_cache_it_goes_to_a_temporary_folder(tmp_path, monkeypatch, capsys, cache_home):
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(standard_library(vocab_size=258, max_bytes=50_000))
    assert folder.parent == tmp_path / f"lmlib-{os.getuid()}"
    assert f"{cache_home}/lmlib cannot be written" in capsys.readouterr().err
    assert standard_library(vocab_size=258, max_bytes=50_000) == str(folder)


def test_too_little_to_hold_anything_out(tmp_path):
    with pytest.raises(ValueError, match="max_bytes=10 leaves"):
        standard_library(vocab_size=300, max_bytes=10, cache=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
