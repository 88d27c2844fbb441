import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forked_processes import run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, processors

from data_tools.prepare_chats.conversations import ConversationField
from data_tools.prepare_chats.prepare import prepare_chats
from data_tools.prepare_chats.template import load_template, template_names
from data_tools.rows.files import Files
from data_tools.tokenizer import (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    MAX_TEXT_BYTES,
    ByteTokenizer,
    JsonTokenizer,
    load_tokenizer,
)
from data_tools.train_tokenizer.byte_level_bpe import (
    SPECIAL_TOKENS,
    STYLES,
    train_byte_level_bpe,
)

TEXT = ["def add(a, b):\n    return a + b\n", "the cat sat on the mat, the cat sat\n"] * 3
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe():
    return train_byte_level_bpe(TEXT, 280)


@settings(max_examples=50)
@given(texts=st.lists(UNICODE, max_size=4))
def test_bytes_are_utf8(texts):
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in encoded] == [list(text.encode()) for text in texts]
    framed = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in encoded]
    assert [tokenizer.decode(ids) for ids in framed] == texts


@settings(max_examples=50)
@given(texts=st.lists(UNICODE, max_size=4))
def test_byte_level_bpe_round_trips_any_text(bpe, texts):
    encoded = bpe.encode_batch(texts)
    assert [bpe.decode(ids) for ids in encoded] == texts
    assert all(ids.dtype == np.uint32 for ids in encoded)
    assert all(2 <= token < bpe.vocab_size for ids in encoded for token in ids)


def test_byte_level_bpe_learns_and_is_deterministic(bpe):
    assert (bpe.vocab_size, bpe.bos_id, bpe.eos_id) == (280, 0, 1)
    assert len(bpe.encode_batch([TEXT[1]])[0]) < len(TEXT[1]) / 2
    assert train_byte_level_bpe(TEXT, 280).tokenizer_json == bpe.tokenizer_json


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_special_tokens_in_a_document_are_text(kind, bpe):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    text = f"before{END_OF_TEXT}between{BEGIN_OF_TEXT}after"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.bos_id not in ids and tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


def test_load_by_name_file_or_folder(tmp_path, bpe):
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


@pytest.fixture(scope="module")
def unusual(bpe):
    """A tokenizer that adds tokens, changes text and truncates it, as `tokenizers` has it."""
    made = Tokenizer.from_str(bpe.tokenizer_json)
    made.normalizer = normalizers.NFKC()
    made.add_tokens([AddedToken("<keep>", lstrip=True), AddedToken("<a word>", single_word=True)])
    made.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    made.enable_truncation(3)
    return made


def test_ids_are_those_of_tokenizers_for_whole_plain_texts(unusual, monkeypatch):
    monkeypatch.setattr("data_tools.tokenizer._BATCH_BYTES", 60)
    texts = [
        *TEXT,
        "",
        "\u1e9b\u0323 x  <keep>y<a word>z <a word>",
        f"a{END_OF_TEXT}b",
        TEXT[1] * 9,
    ]
    reference = Tokenizer.from_str(unusual.to_str())
    reference.no_truncation()
    reference.encode_special_tokens = True
    expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]
    tokenizer = JsonTokenizer("unusual", unusual.to_str())
    for each in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        encoded = each.encode_batch(texts)
        assert [ids.tolist() for ids in encoded] == expected
        assert all(ids.dtype == np.uint32 for ids in encoded)


def test_bad_texts_are_named(bpe):
    for tokenizer in (bpe, ByteTokenizer()):
        with pytest.raises(ValueError, match=r"holds a lone surrogate at character 2"):
            tokenizer.encode_batch(["fine", "ab\ud800"])
    with pytest.raises(ValueError, match=r"has 16,777,218 bytes .* more than 16,777,216: cut it"):
        bpe.encode_batch(["a", "é" * (MAX_TEXT_BYTES // 2 + 1)])


MEASURED = """
import re, sys
from pathlib import Path
from data_tools.tokenizer import JsonTokenizer
text = "The quick brown fox jumps over the lazy dog. It's 1234 o'clock!\\n" * (1 << 14)
ids = JsonTokenizer("x", sys.stdin.read()).encode_batch([text] * 16)
peak = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())
print(len(ids), int(peak.group(1)) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_many_texts_take_little_memory(bpe):
    command = [sys.executable, "-c", MEASURED]
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, input=bpe.tokenizer_json, capture_output=True, text=True, check=True, env=path
    )
    count, mebibytes = map(int, done.stdout.split())
    assert count == 16 and mebibytes < 700


def test_framing_tokens_are_configured_or_given(tmp_path, bpe):
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


def test_a_token_that_begins_and_ends_documents_only_ends_them(tmp_path):
    gpt2 = train_byte_level_bpe(TEXT, 280, special_tokens=["<|endoftext|>"])
    assert (gpt2.bos_id, gpt2.eos_id) == (None, 0)
    (tmp_path / "tokenizer.json").write_text(gpt2.tokenizer_json, encoding="utf-8")
    both = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(both))
    assert load_tokenizer(str(tmp_path)).bos_id is None
    assert load_tokenizer(str(tmp_path), bos_token="<|endoftext|>").bos_id == 0  # as asked for


def test_framing_tokens_can_be_left_out_or_named(tmp_path, bpe):
    (tmp_path / "tokenizer.json").write_text(bpe.tokenizer_json, encoding="utf-8")
    for name in ("bytes", str(tmp_path)):
        tokenizer = load_tokenizer(name, bos_token="")
        assert tokenizer.bos_id is None and tokenizer.eos_id == load_tokenizer(name).eos_id
    with pytest.raises(ValueError, match="'bytes' has no token '<s>'"):
        load_tokenizer("bytes", bos_token="<s>")
    renamed = bpe.tokenizer_json.replace(END_OF_TEXT, "<|stop|>")
    assert JsonTokenizer("renamed", renamed).eos_id is None
    assert JsonTokenizer("renamed", renamed, eos_token="<|stop|>").eos_id == 1


CATS = "The cat sat on the mat in 1984. \n\n It's 12345 cats' mats!"
TEXTS = [CATS, "naïve cafe\u0301 \u212b"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_every_style_splits_text_as_its_model(style):
    tokenizer = train_byte_level_bpe(TEXTS, 285, "x", style, SPECIAL_TOKENS[style])
    names = [token["content"] for token in json.loads(tokenizer.tokenizer_json)["added_tokens"]]
    assert names == list(SPECIAL_TOKENS[style])
    assert tokenizer.eos_id is not None and tokenizer.vocab_size == 285
    (ids,) = tokenizer.encode_batch(["12345"])
    longest = max(len(tokenizer.decode([i])) for i in ids.tolist())
    assert longest <= {"gpt2": 5, "llama3": 3, "qwen2": 1}[style]
    if style == "qwen2":
        assert tokenizer.decode(tokenizer.encode_batch(["e\u0301"])[0].tolist()) == "é"


def test_special_tokens_are_distinct_and_fit():
    with pytest.raises(ValueError, match="at least 259, not 258: 256 bytes and 3 special tokens"):
        train_byte_level_bpe(TEXTS, 258, special_tokens=["a", "b", "c"])
    for names in (["a", "a"], [""]):
        with pytest.raises(ValueError, match="hold an empty or equal names"):
            train_byte_level_bpe(TEXTS, 300, special_tokens=names)


def command_line(*arguments):
    return run_forked("-m", "data_tools.train_tokenizer", *arguments)


CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the mat"}]
OF_STYLE = {"gpt2": "chatml", "llama3": "llama3", "qwen2": "qwen2"}


@pytest.mark.landing
@pytest.mark.parametrize("style", STYLES)
def test_every_template_takes_the_tokenizer_of_every_style(tmp_path, style):
    lines = "".join(json.dumps({"text": text, "messages": CHAT}) + "\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(lines)
    source, made = f"--dataset={tmp_path / 'texts.jsonl'}", tmp_path / "made"
    done = command_line(source, f"--out={made}", f"--style={style}", "--vocab_size=290")
    assert done.returncode == 0, done.stderr
    tokenizer = load_tokenizer(str(made))
    names = SPECIAL_TOKENS[style]
    framing = (None, "<|endoftext|>") if style != "llama3" else names[:2]
    assert (tokenizer.bos_id, tokenizer.eos_id) == tuple(
        None if name is None else names.index(name) for name in framing
    )
    field = ConversationField()
    for name in template_names():
        template = load_template(str(made), name)
        rows = Files([str(tmp_path / "texts.jsonl")], field=field)
        split = prepare_chats(rows, tokenizer, template, tmp_path / name, "train")
        assert split.documents == len(TEXTS) and split.targets
    again = run_forked(
        *("-m", "data_tools.prepare_chats", source, f"--tokenizer={made}", "--workers=0"),
        *(f"--template={OF_STYLE[style]}", f"--out={tmp_path}/o"),
    )
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_transformers_knows_the_tokens_of_every_style(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs lmlib[parity]")
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    for style in STYLES:
        made = tmp_path / style
        source = f"--dataset={tmp_path / 'a.txt'}"
        command_line(source, f"--out={made}", f"--style={style}", "--vocab_size=280")
        ours, theirs = load_tokenizer(str(made)), transformers.AutoTokenizer.from_pretrained(made)
        assert theirs.eos_token_id == ours.eos_id
        assert theirs.bos_token_id == (0 if ours.bos_id is None else ours.bos_id)
        text = "It's 12345 cats ' mats ."
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode_batch([text])[0].tolist() and theirs.decode(ids) == text


def test_a_configuration_of_another_tokenizer_is_not_overwritten(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "a.txt").write_text(TEXTS[0])
    source, made = f"--dataset={tmp_path / 'a.txt'}", f"--out={tmp_path / 'a.json'}"
    done = command_line(source, made, "--vocab_size=290")
    assert done.returncode == 2 and "tokenizer_config.json exists already" in done.stderr
    assert not (tmp_path / "a.json").exists()


@pytest.mark.slow
def test_command_line(tmp_path):
    file = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    file.write_text("\n".join([*lines, "{"]))
    common = [f"--dataset={file}", f"--out={tmp_path / 'made'}", "--style=llama3"]
    failed = command_line(*common, "--vocab_size=280")
    assert failed.returncode == 2
    assert failed.stderr.startswith("train_tokenizer: ") and failed.stderr.count("\n") == 1
    assert "texts.jsonl, line 7, is not JSON" in failed.stderr and not (tmp_path / "made").exists()

    done = command_line(*common, "--vocab_size=280", "--on_bad_row=skip")
    assert done.returncode == 0, done.stderr
    assert "vocabulary        280\n" in done.stdout and "skipped rows      1\n" in done.stdout
    tokenizer = load_tokenizer(str(tmp_path / "made"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 280)

    again = command_line(*common, "--vocab_size=280")
    assert again.returncode == 2 and "exists already" in again.stderr
    file.write_text("")
    empty = command_line(f"--dataset={file}", f"--out={tmp_path / 'x'}", "--vocab_size=280")
    assert empty.returncode == 2 and "the source has no text" in empty.stderr
