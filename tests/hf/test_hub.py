"""Names on the Hub: what is fetched is a folder like any other, and what to do without a network.

There is none in the tests; the cache of `huggingface_hub` is filled by hand.
"""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from small_folder import assert_same_weights, golden_model
from small_tokenizer import write_tokenizer_folder

from data_tools.tokenizer import load_tokenizer
from lmlib import hf
from lmlib.data.chats.chat import read_chat_template
from lmlib.hf.hub import local_folder_of
from lmlib.models.families.hugging_face.settings import FolderError

GOLDEN = Path(__file__).parent / "golden" / "llama"


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """Where the cache has the files of `someone/small-model`; none yet."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--someone--small-model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("a1b2")
    (model / "snapshots" / "a1b2").mkdir(parents=True)
    return model / "snapshots" / "a1b2"


def test_a_name_is_a_folder_once_it_is_fetched(snapshot):
    shutil.copy(GOLDEN / "config.json", snapshot)
    assert local_folder_of("someone/small-model", weights=False) == snapshot
    with pytest.raises(FolderError, match=r"no network, or no \*\.safetensors there"):
        local_folder_of("someone/small-model")
    shutil.copy(GOLDEN / "model.safetensors", snapshot)
    assert local_folder_of("someone/small-model") == snapshot


def as_links(snapshot, folder):
    """The files of `folder` as `huggingface_hub` keeps them."""
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"digest{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/digest{number}")


def test_the_links_of_a_snapshot_to_its_blobs_are_followed(snapshot, tmp_path):
    write_tokenizer_folder(tmp_path / "here", begins=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, tmp_path / "here")
    as_links(snapshot, tmp_path / "here")
    loaded = hf.load("someone/small-model")
    assert_same_weights(loaded, golden_model())
    assert load_tokenizer(str(snapshot)).bos_id is not None
    assert read_chat_template(snapshot) is not None
    hf.save(loaded, tmp_path / "out", tokenizer=snapshot)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copied = tmp_path / "out" / name
        assert copied.read_bytes() == (tmp_path / "here" / name).read_bytes()
        assert not copied.is_symlink()


def test_links_to_another_repository_are_not(snapshot, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, snapshot)
    private = tmp_path / "models--someone--private" / "blobs"
    private.mkdir(parents=True)
    (private / "digest").write_text("secret")
    (snapshot / "merges.txt").symlink_to("../../../models--someone--private/blobs/digest")
    with pytest.raises(FolderError, match=r"merges\.txt cannot be used: it is a link to .*private"):
        hf.save(hf.load(snapshot), tmp_path / "out", tokenizer=snapshot)


def test_without_a_network_it_is_told_what_to_do(snapshot):
    with pytest.raises(FolderError) as error:
        hf.load("someone/large-model")
    assert str(error.value) == (
        "someone/large-model is no folder here, and cannot be fetched from Hugging Face's Hub "
        "(there is no network): where there is a network, "
        "`hf download someone/large-model --local-dir FOLDER` makes a folder of it; "
        "give that folder"
    )


@pytest.mark.parametrize("name", ["folder", "./someone/model", "/someone/model", "a/b/c", "../b"])
def test_what_is_no_name_is_a_folder(name):
    assert local_folder_of(name) == Path(name)
