"""Tokenizers and chat templates in GGUF files, read back."""

import json

import gguf_models
import pytest
from gguf_tokenizers import NAMES, SAMPLES, tokenizer_json
from small_tokenizer import CHAT
from tokenizers import Tokenizer

from lmlib.data.chats.chat import read_chat_template

gguf = pytest.importorskip("gguf")

from lmlib.gguf import save, to_folder  # noqa: E402

ENDS = {"bos_token_id": 0, "eos_token_id": 1}


def saved(tmp_path, text, vocab=420, **how):
    model = gguf_models.random_model(
        {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": vocab}
    )
    save(model, tmp_path / "model.gguf", tokenizer=text, **{"settings": ENDS, **how})
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_read_back_gives_the_same_ids_and_texts(name, tmp_path):
    text = tokenizer_json(name)
    file = saved(tmp_path, text)
    kind = gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents()
    assert kind == ("default" if name == "llama" else name)
    to_folder(file, tmp_path / "back")
    before = Tokenizer.from_str(text)
    after = Tokenizer.from_file(str(tmp_path / "back/tokenizer.json"))
    for sample in SAMPLES:
        ids = before.encode(sample).ids
        assert after.encode(sample).ids == ids
        assert after.decode(ids) == before.decode(ids)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


def test_chat_templates_are_kept(tmp_path):
    file = saved(tmp_path, tokenizer_json("gpt-2"), chat_templates={"default": CHAT})
    to_folder(file, tmp_path / "back")
    template = read_chat_template(tmp_path / "back")
    assert template.sources == {"default": CHAT}
    assert template.special_tokens["eos_token"] == "</s>"


def changed(name, change):
    content = json.loads(tokenizer_json(name))
    change(content)
    return json.dumps(content)


def test_tokenizers_that_llama_cpp_does_not_have_are_refused(tmp_path):
    def other_words(content):
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"

    def folded(content):
        content["normalizer"] = {"type": "Lowercase"}

    def unmerged(content):
        content["model"]["merges"] = content["model"]["merges"][:-2]

    def without_a_letter(content):
        del content["model"]["vocab"]["e"]
        content["model"]["merges"] = [
            pair for pair in content["model"]["merges"] if "e" not in pair
        ]

    for name, change, message in (
        ("dbrx", other_words, "no name for how this tokenizer finds words"),
        ("gpt-2", folded, "after the normalizer .*Lowercase"),
        ("llama", unmerged, "form a token but no merge"),
        ("llama", without_a_letter, "form a token but no merge"),
        ("llama", folded, "has no normalizer .*Lowercase"),
    ):
        with pytest.raises(ValueError, match=message):
            saved(tmp_path, changed(name, change))
    with pytest.raises(ValueError, match="the tokenizer has the id 399, but the model 300 tokens"):
        saved(tmp_path, tokenizer_json("gpt-2"), vocab=300)
    with pytest.raises(ValueError, match="no token is known to end texts"):
        saved(tmp_path, tokenizer_json("gpt-2"), settings={})
    assert not any(tmp_path.iterdir())
