"""Tokenizer folders from a stranger."""

import copy
import json
import os

import pytest
from strangers import CANARY, assert_refused, leave_canary, outcomes, sparse, text

from data_tools.tokenizer import load_tokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe

CONFIG = "tokenizer_config.json"
SOUND = json.loads(train_byte_level_bpe(["hello world"] * 9, 300).tokenizer_json)
LOAD = "from data_tools.tokenizer import load_tokenizer"
USE = """
    tokenizer = load_tokenizer(arguments)
    ids = tokenizer.encode_batch(["hello  a world 123", "", "e" * 100])
    tokenizer.decode([0, 5, 2**32 - 1, *ids[0].tolist()])
"""


def changed(**entries):
    """Returns the sound tokenizer.json with changes; `a__b` is entry b of entry a."""
    content = copy.deepcopy(SOUND)
    for path, value in entries.items():
        *outer, last = path.split("__")
        place = content
        for part in outer:
            place = place[part]
        place[last] = value
    return content


def added(**entries):
    token = {"id": 0, "content": "a", "special": False, "normalized": False}
    return token | {"single_word": False, "lstrip": False, "rstrip": False} | entries


REFUSED = {
    "nothing": "",
    "a list": [],
    "deep": "[" * 1_000_000,
    "an id beyond": changed(added_tokens=[added(id=2**40, content="x")]),
    "merges of nothing": changed(model__merges=[["h", "zzz"]]),
    "dropout": changed(model__dropout=5.0),
}
HARMLESS = {
    "sound": SOUND,
    "a large id": changed(added_tokens=[added(id=2**32 - 1, content="x")]),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, content in (REFUSED | HARMLESS).items():
        (folder / name).mkdir()
        whole = content if isinstance(content, str) else json.dumps(content)
        (folder / name / "tokenizer.json").write_text(whole)
    (folder / "long").mkdir()
    sparse("tokenizer.json", 50 << 30)(folder / "long")
    cases = {name: str(folder / name) for name in (*REFUSED, *HARMLESS, "long")}
    return outcomes(LOAD, USE, cases, folder)


@pytest.mark.parametrize("name", [*REFUSED, "long"])
def test_invalid_tokenizers_are_refused_in_a_line(loaded, name):
    assert_refused(loaded[name], "ValueError")


@pytest.mark.parametrize("name", HARMLESS)
def test_a_tokenizer_allocates_nothing_on_its_word(loaded, name):
    assert loaded[name] == ("opened", "")


def test_code_beside_a_tokenizer_is_not_run(tmp_path):
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


@pytest.mark.parametrize(
    "write",
    [
        sparse(CONFIG, 50 << 30),
        text(CONFIG, "[" * 1_000_000),
        text(CONFIG, '{"bos_token": ["x"]}'),
        text(CONFIG, '{"bos_token": "<s>", "bos_token": "x"}'),
    ],
)
def test_an_odd_tokenizer_config_is_refused(tmp_path, write):
    (tmp_path / "tokenizer.json").write_text(json.dumps(SOUND))
    write(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json") as raised:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_elsewhere_is_not_taken_for_the_folders(tmp_path, name):
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


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
