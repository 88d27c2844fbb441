import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.tokenizer import (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
)
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe

TEXT = ["def add(a, b):\n    return a + b\n", "the cat sat on the mat, the cat sat\n"] * 3
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return train_byte_level_bpe(TEXT, 280)


@settings(max_examples=50)
@given(texts=st.lists(UNICODE, max_size=4))
def test_bytes_are_utf8(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in encoded] == [list(text.encode()) for text in texts]
    framed = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in encoded]
    assert [tokenizer.decode(ids) for ids in framed] == texts


@settings(max_examples=50)
@given(texts=st.lists(UNICODE, max_size=4))
def test_byte_level_bpe_round_trips_any_text(bpe: JsonTokenizer, texts: list[str]) -> None:
    encoded = bpe.encode_batch(texts)
    assert [bpe.decode(ids) for ids in encoded] == texts
    assert all(ids.dtype == np.uint32 for ids in encoded)
    assert all(2 <= token < bpe.vocab_size for ids in encoded for token in ids)


def test_byte_level_bpe_learns_and_is_deterministic(bpe: JsonTokenizer) -> None:
    assert (bpe.vocab_size, bpe.bos_id, bpe.eos_id) == (280, 0, 1)
    assert len(bpe.encode_batch([TEXT[1]])[0]) < len(TEXT[1]) / 2
    assert train_byte_level_bpe(TEXT, 280).tokenizer_json == bpe.tokenizer_json
    with pytest.raises(ValueError, match="at least 258, not 257"):
        train_byte_level_bpe(TEXT, 257)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_special_tokens_in_a_document_are_text(kind: str, bpe: JsonTokenizer) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    text = f"before{END_OF_TEXT}between{BEGIN_OF_TEXT}after"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.bos_id not in ids and tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


def test_load_by_name_file_or_folder(tmp_path: Path, bpe: JsonTokenizer) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(bpe.tokenizer_json, encoding="utf-8")
    for name in (str(file), str(tmp_path)):
        tokenizer = load_tokenizer(name)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 280)
        assert tokenizer.identity.name == name
        assert tokenizer.identity.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        assert tokenizer.encode_batch(TEXT)[0].tolist() == bpe.encode_batch(TEXT)[0].tolist()
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    assert load_tokenizer("bytes").identity.sha256 is None


def test_truncation_and_padding_of_the_file_are_ignored(bpe: JsonTokenizer) -> None:
    content = json.loads(bpe.tokenizer_json)
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer = JsonTokenizer("truncating", json.dumps(content))
    assert tokenizer.encode_batch(TEXT)[0].tolist() == bpe.encode_batch(TEXT)[0].tolist()


def test_which_tokens_frame_a_document(tmp_path: Path, bpe: JsonTokenizer) -> None:
    (tmp_path / "tokenizer.json").write_text(bpe.tokenizer_json, encoding="utf-8")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": None, "eos_token": {"content": "a"}}))
    a, b = (bpe.encode_batch([letter])[0][0] for letter in "ab")
    assert load_tokenizer(str(tmp_path)).eos_id == a
    assert load_tokenizer(str(tmp_path), eos_token="b").eos_id == b
    with pytest.raises(ValueError, match="no token '<nope>' for bos_token"):
        load_tokenizer(str(tmp_path), bos_token="<nope>")
    config.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be used"):
        load_tokenizer(str(tmp_path))


def test_a_token_that_begins_and_ends_documents_only_ends_them(tmp_path: Path) -> None:
    gpt2 = train_byte_level_bpe(TEXT, 280, special_tokens=["<|endoftext|>"])
    assert (gpt2.bos_id, gpt2.eos_id) == (None, 0)
    (tmp_path / "tokenizer.json").write_text(gpt2.tokenizer_json, encoding="utf-8")
    both = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(both))
    assert load_tokenizer(str(tmp_path)).bos_id is None
    assert load_tokenizer(str(tmp_path), bos_token="<|endoftext|>").bos_id == 0  # as asked for


def test_an_empty_bos_token_is_none(tmp_path: Path, bpe: JsonTokenizer) -> None:
    (tmp_path / "tokenizer.json").write_text(bpe.tokenizer_json, encoding="utf-8")
    for name in ("bytes", str(tmp_path)):
        tokenizer = load_tokenizer(name, bos_token="")
        assert tokenizer.bos_id is None and tokenizer.eos_id == load_tokenizer(name).eos_id
    with pytest.raises(ValueError, match="'bytes' has no token '<s>'"):
        load_tokenizer("bytes", bos_token="<s>")


def test_an_unknown_end_of_text_must_be_named(bpe: JsonTokenizer) -> None:
    renamed = bpe.tokenizer_json.replace(END_OF_TEXT, "<|stop|>")
    assert JsonTokenizer("renamed", renamed).eos_id is None
    assert JsonTokenizer("renamed", renamed, eos_token="<|stop|>").eos_id == 1
