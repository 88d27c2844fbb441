"""Tokenizer folders from a stranger."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strangers import CANARY, assert_refused, leave_canary, outcomes

from data_tools.tokenizer import load_tokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe

SOUND = json.loads(train_byte_level_bpe(["hello world"] * 9, 300).tokenizer_json)
LOAD = "from data_tools.tokenizer import load_tokenizer"
USE = """
    tokenizer = load_tokenizer(arguments)
    ids = tokenizer.encode_batch(["hello  a world 123", "", "e" * 100])
    tokenizer.decode([0, 5, 2**32 - 1, *ids[0].tolist()])
"""


def changed(**entries: Any) -> dict[str, Any]:
    """Of the sound tokenizer.json; `a__b` is entry b of entry a."""
    content = copy.deepcopy(SOUND)
    for path, value in entries.items():
        *outer, last = path.split("__")
        place = content
        for part in outer:
            place = place[part]
        place[last] = value
    return content


def added(**entries: Any) -> dict[str, Any]:
    token = {"id": 0, "content": "a", "special": False, "normalized": False}
    return token | {"single_word": False, "lstrip": False, "rstrip": False} | entries


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


WORD_LEVEL = {"type": "WordLevel", "vocab": {}, "unk_token": "x"}
WORD_PIECE = {
    "type": "WordPiece",
    "vocab": {"a": 0},
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 0,
}
FIXED = {
    "strategy": {"Fixed": 10**15},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "x",
}

REFUSED: dict[str, Any] = {
    "nothing": "",
    "a list": [],
    "deep": "[" * 1_000_000,
    "deep objects": '{"model":' * 100_000,
    "no tokens": changed(model=WORD_LEVEL, added_tokens=[]),
    "an id beyond": changed(added_tokens=[added(id=2**40, content="x")]),
    "merges of nothing": changed(model__merges=[["h", "zzz"]]),
    "a prefix": changed(model__continuing_subword_prefix="#" * 1000),
    "no unknown": changed(model=WORD_PIECE, added_tokens=[]),
    "an expression": changed(pre_tokenizer=split("((((")),
    "a table": changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a strip": changed(decoder={"type": "Strip", "content": "a", "start": 10**12, "stop": 10**12}),
    "dropout": changed(model__dropout=5.0),
}
HARMLESS: dict[str, Any] = {
    "sound": SOUND,
    "a large id": changed(added_tokens=[added(id=2**32 - 1, content="x")]),
    "padding": changed(padding=FIXED),
    "an empty expression": changed(pre_tokenizer=split("")),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, content in (REFUSED | HARMLESS).items():
        (folder / name).mkdir()
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name / "tokenizer.json").write_text(text)
    (folder / "long").mkdir()
    with open(folder / "long" / "tokenizer.json", "wb") as stream:
        stream.truncate(50 << 30)
    cases = {name: str(folder / name) for name in (*REFUSED, *HARMLESS, "long")}
    return outcomes(LOAD, USE, cases, folder)


@pytest.mark.parametrize("name", [*REFUSED, "long"])
def test_what_is_no_tokenizer_is_refused_in_a_line(
    loaded: dict[str, tuple[str, str]], name: str
) -> None:
    assert_refused(loaded[name], "ValueError")


@pytest.mark.parametrize("name", HARMLESS)
def test_a_tokenizer_allocates_nothing_on_its_word(
    loaded: dict[str, tuple[str, str]], name: str
) -> None:
    assert loaded[name] == ("opened", "")


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(SOUND))
    for name in ("evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(leave_canary(tmp_path))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", "evil.Evil"]},
                "tokenizer_class": "Evil",
                "trust_remote_code": True,
                "bos_token": {"content": "<|end_of_text|>", "__type": "AddedToken"},
            }
        )
    )
    assert load_tokenizer(str(folder)).eos_id == 1
    assert not (tmp_path / CANARY).exists()


def sparse(file: Path) -> None:
    with open(file, "wb") as stream:
        stream.truncate(50 << 30)


@pytest.mark.parametrize(
    "write",
    [
        sparse,
        lambda file: file.write_text("[" * 1_000_000),
        lambda file: file.write_text('{"bos_token": ["x"]}'),
        lambda file: file.write_text('{"eos_token": {"content": {"a": 1}}}'),
        lambda file: file.write_text('{"bos_token": "<s>", "bos_token": "x"}'),
        lambda file: file.write_bytes(b"\xff"),
    ],
)
def test_an_odd_tokenizer_config_is_refused(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(SOUND))
    write(tmp_path / "tokenizer_config.json")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json") as raised:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["[]", "null", "5", '{"bos_token": null}'])
def test_a_tokenizer_config_may_say_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(SOUND))
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert load_tokenizer(str(tmp_path)).bos_id == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_elsewhere_is_not_taken_for_the_folders(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(SOUND))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} cannot be used: it is a link to .* put a copy"):
        load_tokenizer(str(folder))
    if name == "tokenizer.json":  # which the user may name himself
        assert load_tokenizer(str(folder / name)).bos_id == 0


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
