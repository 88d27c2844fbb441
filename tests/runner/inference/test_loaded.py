"""Models of runs and of Hugging Face's folders, loaded with their texts' codec."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from byte_texts import BOS, EOS
from run_on_bytes import write_run_on_bytes

from lmlib import hf
from lmlib.parallel.mesh import make_mesh
from runner import convert
from runner.command_line.errors import ConfigError
from runner.inference.loaded import load
from runner.training.references import located

LLAMA = Path(__file__).parents[2] / "hf" / "golden" / "llama"
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
    "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "decoder": None,
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]}
                           for name, id in (("<s>", 5), ("</s>", 2))},
    },
    "model": {"type": "WordLevel", "unk_token": "a",
              "vocab": {"a": 0, "b": 1, "</s>": 2, "<s>": 5}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of Hugging Face's, with a tokenizer that frames its texts."""
    folder = tmp_path_factory.mktemp("folder")
    shutil.copytree(LLAMA, folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    return folder


def assert_same_weights(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.several_devices
def test_a_folder_and_what_was_imported_of_it_are_the_same(folder, tmp_path):
    convert.bring_in(located(str(folder)), tmp_path / "run")
    mesh = make_mesh(fsdp=2)
    for reference in (str(folder), str(tmp_path / "run")):
        found = load(reference, mesh=mesh)
        assert_same_weights(found.model, hf.load(folder))
        assert found.codec.encode("b a b") == [5, 1, 0, 1]
        assert found.end_ids == (2, 3)
        assert found.longest == 512
        assert found.tokenizer.sha256 is not None
        assert (found.tokenizer_folder / "tokenizer.json").is_file()
    assert (found.step, found.name) == (0, f"{tmp_path / 'run'}@0")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on bytes, at step 3, and its model; its data is in `data`."""
    return write_run_on_bytes(tmp_path_factory.mktemp("bytes"))


def test_a_run_whose_mesh_is_not_there(run):
    workdir, model = run
    found = load(f"{workdir}@3")
    assert found.mesh.size == len(jax.devices())  # all, though the run's were 64
    assert_same_weights(found.model, model)
    assert found.codec.encode("hi") == [BOS, *b"hi"]
    assert (found.end_ids, found.longest, found.step) == ((EOS,), 24, 3)
    assert found.document_end == EOS


def test_a_run_whose_data_is_gone(run):
    workdir, _ = run
    data = workdir.parent / "data"
    data.rename(workdir.parent / "gone")
    try:
        found = load(str(workdir), mesh=make_mesh())
    finally:
        (workdir.parent / "gone").rename(data)
    assert found.codec.encode("hi") == [*b"hi"]
    assert found.tokenizer.name == "bytes"
    assert found.end_ids == ()


@pytest.mark.parametrize(
    ("reference", "told"), [("{}@4", "no checkpoint at step 4"), ("{}/no", "is no folder")]
)
def test_what_is_not_there_is_named(run, reference, told):
    with pytest.raises(ConfigError, match=told):
        load(reference.format(run[0]))
