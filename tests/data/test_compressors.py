"""Lengths of compressed texts, compared with the program xz, and decoded again."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lmlib.data import compressors
from lmlib.data.stored.metadata import DamagedDataError

TEXTS = [Path(file).read_text(encoding="utf-8") for file in (__file__, pytest.__file__)]
TRAINING = [Path(compressors.__file__).read_text(encoding="utf-8")]
PPMD = [code for code in compressors.available() if code.startswith("PPMd")]


@pytest.mark.skipif(shutil.which("xz") is None, reason="needs the program xz")
def test_xz_matches_the_command():
    def command(text):
        done = subprocess.run(["xz", "-9e"], input=text.encode(), capture_output=True, check=True)
        return len(done.stdout)

    found = compressors.measure(TEXTS, TRAINING)
    assert found["xz -9e of each text"] == sum(map(command, TEXTS))
    assert found["xz -9e of the whole text"] == command("".join(TEXTS))


def test_ppmd_matches_a_decodable_code():
    pyppmd = pytest.importorskip("pyppmd")
    whole, before = "".join(TEXTS).encode(), "".join(TRAINING).encode()
    found = compressors.measure(TEXTS, TRAINING, PPMD)

    def code(text):
        encoder = pyppmd.Ppmd7Encoder(16, 1 << 24)
        made = b"".join(encoder.encode(bytes([byte])) for byte in text) + encoder.flush()
        assert pyppmd.Ppmd7Decoder(16, 1 << 24).decode(made, len(text)) == text
        return made

    alone, after = PPMD
    assert found[alone] == len(code(whole))
    assert found[after] == pytest.approx(len(code(before + whole)) - len(code(before)), abs=8)
    assert found[after] < found[alone]


def test_only_one_code_saw_the_training_text():
    saw = [code for code in compressors.available() if compressors.saw_training_text(code)]
    assert saw == [code for code in PPMD if "after the training text" in code]
    changed = compressors.measure(TEXTS, ["something else"])
    found = compressors.measure(TEXTS, TRAINING)
    assert {code for code in found if found[code] != changed[code]} == set(saw)


def test_saved_lengths_are_read(tmp_path):
    assert compressors.read(tmp_path) == {}
    told = []
    measured = compressors.measure(TEXTS, TRAINING, report=told.append)
    assert tuple(told) == tuple(measured) == compressors.available()
    compressors.save(tmp_path, measured)
    assert compressors.read(tmp_path) == measured


@pytest.mark.parametrize("content", ["", "[1]", '{"xz -9e of each text": "1"}', '{"a": -1}', "{"])
def test_a_damaged_record_is_named(tmp_path, content):
    (tmp_path / compressors.FILE_NAME).write_text(content)
    with pytest.raises(DamagedDataError, match=r"compressors\.json"):
        compressors.read(tmp_path)
