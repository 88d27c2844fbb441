import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_tools.encoders import make_encoder
from data_tools.encoders.byte_level import ByteLevelEncoder
from data_tools.tokenizer import load_tokenizer
from data_tools.train_tokenizer import SPECIAL_TOKENS, train_byte_level_bpe
from data_tools.train_tokenizer.byte_level_bpe import STYLES, Style

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


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "data_tools.train_tokenizer", *arguments]
    repository = Path(__file__).parents[2]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120)


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
