"""Folders of Hugging Face's from a stranger: no time, no memory and no other file on their word."""

import json
import os
import shutil
import struct

import pytest
from sentinels import sentinels
from small_folder import change, copy_small_folder
from strangers import assert_refused, link, outcomes, sparse, text

IMPORTS = """
import signal
from lmlib import hf
"""
# Ends a process that waits for a pipe, or allocates as much as a file claims.
LOAD = """
    signal.alarm(100)
    hf.load(arguments)
"""
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
KEY, VALUE = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "kv")


def header(change):
    """Changes the header, or writes what `change` returns in its place."""

    def write(folder):
        content = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + size])
        text = (change(entries) or json.dumps(entries)).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return write


def exchanged(entries):
    """Keys and values, once more under each other's names."""
    again = json.dumps({KEY: entries[VALUE], VALUE: entries[KEY]})
    return f"{json.dumps(entries)[:-1]}, {again[1:]}"


def pipe(name):
    def make(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def twice(folder):
    content = (folder / CONFIG).read_text().rstrip().removesuffix("}")
    (folder / CONFIG).write_text(f'{content}, "rms_norm_eps": 0.5}}')


LISTS = "[" + "[]," * 20_000_000 + "[]]"
NAMES = ", ".join(f'"tensor {number}": "{WEIGHTS}"' for number in range(100_000))
REFUSED = {
    "tensors exchanged": (header(exchanged), f"it has the name {KEY!r} twice"),
    "a key twice": (twice, "it has the name 'rms_norm_eps' twice"),
    "a header of lists": (header(lambda _: LISTS), "its header cannot be 60,000,004 bytes"),
    "a config of lists": (text(CONFIG, LISTS[: 9 << 20]), "more than 2,000,000 objects and lists"),
    "a long config": (sparse(CONFIG, 50 << 30), "has more than 10,000,000 bytes"),
    "a long index": (sparse(INDEX, 50 << 30), "has more than 33,554,432 bytes"),
    "an index of names": (text(INDEX, f'{{"weight_map": {{{NAMES}}}}}'), "has it in None"),
    "a shape of ones": (header(lambda each: each[KEY].update(shape=[1] * 3_000_000)), KEY),
    "a long number": (
        header(lambda each: json.dumps(each).replace("[8, 16]", f"[{'9' * 16_000_000}]", 1)),
        "its JSON cannot be read",
    ),
    "many layers": (
        lambda folder: change(folder, num_hidden_layers=10_000),
        "the 10,000 layers in config.json need 10,000 tensors of one kind, but the folder has 30",
    ),
    "a long value": (
        lambda folder: change(folder, rms_norm_eps=[1] * 10**6),
        "is not of type float",
    ),
    "many keys": (
        lambda folder: change(folder, **{f"k{number}": 1 for number in range(100_000)}),
        "and 99995 more: unknown here",
    ),
    "a pipe for weights": (pipe(WEIGHTS), "it is not a regular file"),
    "a config without end": (link(CONFIG, "/dev/zero"), "it is a link to /dev/zero, which is not"),
    "weights elsewhere": (link(WEIGHTS), "which is not in its folder: put a copy"),
    "a link to itself": (link(CONFIG, CONFIG), "Too many levels of symbolic links"),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    for name in ("sound", *REFUSED):
        (folder / name).mkdir()
        copy_small_folder(folder / name)
        if name in REFUSED:
            REFUSED[name][0](folder / name)
    found = outcomes(
        IMPORTS, LOAD, {name: str(folder / name) for name in ("sound", *REFUSED)}, folder
    )
    shutil.rmtree(folder)
    return found


@pytest.mark.parametrize("name", sentinels(REFUSED, lambda name: name != "tensors exchanged"))
def test_it_is_refused_in_a_line(loaded, name):
    assert loaded["sound"] == ("opened", "")
    assert_refused(loaded[name], "FolderError")
    told = loaded[name][1]
    assert REFUSED[name][1] in told and name in told
    assert len(told) < 1_500
