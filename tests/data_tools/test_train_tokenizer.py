import json
from pathlib import Path

import pytest
from forked_processes import Ended, run_forked

from data_tools.encoders import make_encoder
from data_tools.encoders.byte_level import ByteLevelEncoder
from data_tools.prepare_chats.conversations import ConversationField
from data_tools.prepare_chats.prepare import prepare_chats
from data_tools.prepare_chats.template import load_template, template_names
from data_tools.rows.files import Files
from data_tools.tokenizer import load_tokenizer
from data_tools.train_tokenizer.byte_level_bpe import (
    SPECIAL_TOKENS,
    STYLES,
    Style,
    train_byte_level_bpe,
)

TEXTS = [
    "The cat sat on the mat in 1984. \n\n It's 12345 cats' mats!",
    "naïve cafe\u0301 \u212b",
] * 3


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_encoded_fast(style: Style) -> None:
    tokenizer = train_byte_level_bpe(TEXTS, 285, "x", style, SPECIAL_TOKENS[style])
    assert isinstance(make_encoder(tokenizer.tokenizer_json), ByteLevelEncoder)
    names = [token["content"] for token in json.loads(tokenizer.tokenizer_json)["added_tokens"]]
    assert names == list(SPECIAL_TOKENS[style])
    assert tokenizer.eos_id is not None and tokenizer.vocab_size == 285
    (ids,) = tokenizer.encode_batch(["12345"])
    longest = max(len(tokenizer.decode([i])) for i in ids.tolist())
    assert longest <= {"gpt2": 5, "llama3": 3, "qwen2": 1}[style]
    if style == "qwen2":
        assert tokenizer.decode(tokenizer.encode_batch(["e\u0301"])[0].tolist()) == "é"


def test_special_tokens_are_distinct_and_fit() -> None:
    with pytest.raises(ValueError, match="at least 259, not 258: 256 bytes and 3 special tokens"):
        train_byte_level_bpe(TEXTS, 258, special_tokens=["a", "b", "c"])
    for names in (["a", "a"], [""]):
        with pytest.raises(ValueError, match="hold an empty or equal names"):
            train_byte_level_bpe(TEXTS, 300, special_tokens=names)


def command_line(*arguments: str) -> Ended:
    return run_forked("-m", "data_tools.train_tokenizer", *arguments)


CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the mat"}]


OF_STYLE = {"gpt2": "chatml", "llama3": "llama3", "qwen2": "qwen2"}


@pytest.mark.landing
@pytest.mark.parametrize("style", STYLES)
def test_every_template_takes_the_tokenizer_of_every_style(tmp_path: Path, style: Style) -> None:
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
def test_transformers_knows_the_tokens_of_every_style(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs lmlib[parity]")
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    for style in STYLES:
        made = tmp_path / style
        command_line(
            *(f"--dataset={tmp_path / 'a.txt'}", f"--out={made}", f"--style={style}"),
            "--vocab_size=280",
        )
        ours, theirs = load_tokenizer(str(made)), transformers.AutoTokenizer.from_pretrained(made)
        assert theirs.eos_token_id == ours.eos_id
        assert theirs.bos_token_id == (0 if ours.bos_id is None else ours.bos_id)
        text = "It's 12345 cats ' mats ."
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode_batch([text])[0].tolist() and theirs.decode(ids) == text


def test_a_configuration_of_another_tokenizer_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "a.txt").write_text(TEXTS[0])
    source, made = f"--dataset={tmp_path / 'a.txt'}", f"--out={tmp_path / 'a.json'}"
    done = command_line(source, made, "--vocab_size=290")
    assert done.returncode == 2 and "tokenizer_config.json is there already" in done.stderr
    assert not (tmp_path / "a.json").exists()


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
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
