"""Names on the Hub: what is fetched is a folder like any other, and what to do without a network.

There is none in the tests; the cache of `huggingface_hub` is filled by hand.
"""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from lmlib import hf
from lmlib.hf.hub import local_folder_of
from lmlib.hf.tensor_files import FolderError

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
