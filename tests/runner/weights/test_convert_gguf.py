"""`runner.convert` from and to GGUF files, and to int8 and int4 folders."""

import json
import shutil

import pytest
from gguf_models import random_model, write_folder
from gguf_tokenizers import tokenizer_json
from hugging_face_families import GOLDEN
from small_folder import assert_same_tensors
from small_tokenizer import CHAT

pytest.importorskip("gguf")

from lmlib.gguf import to_folder
from lmlib.hf.tensor_files import stored_tensors
from runner import convert
from runner.errors import ConfigError

pytestmark = pytest.mark.landing


@pytest.fixture
def folder(tmp_path):
    """A Qwen 3 with a tokenizer and a chat template."""
    model = random_model({"model_type": "qwen3", "vocab_size": 420, "num_hidden_layers": 1})
    write_folder(model, tmp_path / "folder")
    (tmp_path / "folder/tokenizer.json").write_text(tokenizer_json("qwen2"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}
    (tmp_path / "folder/tokenizer_config.json").write_text(json.dumps(names))
    config = json.loads((tmp_path / "folder/config.json").read_text())
    config |= {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 333}
    (tmp_path / "folder/config.json").write_text(json.dumps(config))
    return tmp_path / "folder"


def test_a_folder_becomes_a_file_and_the_file_a_run(folder, tmp_path):
    file = tmp_path / "model.gguf"
    told = convert.bring_gguf_out(str(folder), file)
    assert "in float32, with the tokenizer" in told
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
    to_folder(file, tmp_path / "plain")
    assert_same_tensors(folder, tmp_path / "plain")
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert (config["max_position_embeddings"], config["eos_token_id"]) == (333, 1)

    with convert.as_folder(str(file), tmp_path / "run", print) as found:
        convert.bring_in(found, tmp_path / "run")
    shutil.rmtree(folder)
    file.unlink()
    convert.bring_out(str(tmp_path / "run"), tmp_path / "out")
    assert_same_tensors(tmp_path / "plain", tmp_path / "out")
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["chat_template"] == CHAT
    again = convert.bring_gguf_out(str(tmp_path / "run"), file, kind="q8_0")
    assert "in q8_0, with the tokenizer" in again

    told = convert.bring_out(str(tmp_path / "run"), tmp_path / "int8", dtype="int8")
    assert "in int8 with a scale for each output, and bfloat16, with the tokenizer" in told
    names = stored_tensors(tmp_path / "int8").keys()
    assert "model.layers.0.mlp.up_proj.weight_packed" in names
    assert not (tmp_path / "int8/whole").exists()


def test_existing_files_and_families_without_gguf_are_refused(folder, tmp_path):
    (tmp_path / "there.gguf").write_text("mine")
    with pytest.raises(ConfigError, match=r"there.gguf exists: give a new file"):
        convert.bring_gguf_out(str(folder), tmp_path / "there.gguf")
    with pytest.raises(ValueError, match="GGUF files of olmo_hybrid are not supported"):
        convert.bring_gguf_out(str(GOLDEN / "olmo_hybrid"), tmp_path / "other.gguf")
    assert not (tmp_path / "other.gguf").exists()
