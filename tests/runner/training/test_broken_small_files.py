"""Files beside the checkpoints that were cut short, edited or lost: made again, or named."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from small_experiment import small

import runner
from lmlib.checkpoint import Restored
from runner import fit
from runner.errors import ConfigError
from runner.training.captures import read_capture
from runner.training.report import finished_summary
from runner.weights.notes import check_notes

ROOT = Path(runner.__file__).parents[1]
STRANGE = (None, [], "text", -1, 1e300, math.nan, {"a": {"b": []}}, True)

PROBE = {"tokenizer": None, "bytes_per_target": 4.5, "steps_made": 3, "first": "1f", "last": "2e"}
NOTES = {
    "tokens": 96,
    "before_skipped": 2,
    "batches": PROBE,
    "initialised_from": "/runs/other@5",
    "frozen": {"digest": "0f", "dtype": "bfloat16", "seed": 0},
    "reference_model": {"digest": "0f", "dtype": "bfloat16"},
}
ABSENT = dict.fromkeys(("before_skipped", "initialised_from", "frozen", "reference_model"))
CAPTURE = {
    "step": 3,
    "line": {"step": 3, "loss": "NaN", "tokens": 96},
    "mesh": {"data": 1, "fsdp": 2},
    "initialised_from": None,
    "jax_settings": {"JAX_ENABLE_X64": "false"},
    "sequences": None,
}


@pytest.mark.slow
def test_broken_files_are_rebuilt_or_named(tmp_path, capsys):
    fit(small("steps=3"), tmp_path)
    log, goodput = tmp_path / "metrics.jsonl", tmp_path / "goodput.json"
    first, _, third = log.read_text().splitlines(keepends=True)
    log.write_text(first + third)
    goodput.write_text(goodput.read_text().replace('"last_step": ', '"last_step": -'))
    capsys.readouterr()
    whole = fit(small("steps=4"), tmp_path).summary
    told = capsys.readouterr().err
    assert f"WARNING: {log} has lost the lines of step 2:" in told
    assert f"WARNING: {goodput}: 1 of 1 starts are damaged" in told

    result = tmp_path / "result.json"
    result.write_bytes(result.read_bytes()[:-40])
    again = fit(small("steps=4"), tmp_path).summary
    told = capsys.readouterr().err
    assert f"WARNING: {result} is damaged" in told
    assert f"WARNING: {log} has lost the lines of step 2:" in told
    for name in ("steps", "tokens", "training_loss", "samples"):
        assert getattr(again, name) == getattr(whole, name)
    assert finished_summary(tmp_path, 4) == again


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b"\0" * 9])
def test_a_result_that_is_none_is_named(tmp_path, content):
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/result.json is damaged"):
        finished_summary(tmp_path, 3)


def test_notes_that_make_sense_are_taken(tmp_path):
    for notes in (NOTES, NOTES | ABSENT):
        check_notes(Restored(3, None, notes, ()), tmp_path)


@pytest.mark.parametrize("name", NOTES)
def test_notes_that_make_no_sense_are_named(tmp_path, name):
    sound = ([None] if name in ABSENT else []) + (["text"] if name == "initialised_from" else [])
    values = [value for value in STRANGE if value not in sound]
    if name == "frozen":
        values += [NOTES["frozen"] | {"dtype": dtype} for dtype in ("text", "int32")]
    if name == "batches":
        sizes = ("steps_made", "batch_size", "sequence_length")
        values += [PROBE | {size: value} for value in STRANGE for size in sizes]
    for value in values:
        with pytest.raises(ConfigError, match=rf"{tmp_path}/3 are invalid: {name}="):
            check_notes(Restored(3, None, NOTES | {name: value}, ()), tmp_path)
    missing = {key: value for key, value in NOTES.items() if key != name}
    with pytest.raises(ConfigError, match=f"its notes have no {name}"):
        check_notes(Restored(3, None, missing, ()), tmp_path)


@pytest.mark.parametrize("name", ["step", "line", "mesh", "initialised_from", "jax_settings"])
def test_a_capture_that_makes_no_sense_is_named(tmp_path, name):
    file = tmp_path / "capture.json"
    file.write_text(json.dumps(CAPTURE))
    assert read_capture(tmp_path).step == 3
    for value in (*STRANGE, math.inf):
        if name == "initialised_from" and value in (None, "text"):
            continue
        file.write_text(json.dumps(CAPTURE | {name: value}))
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            read_capture(tmp_path)
    missing = {key: value for key, value in CAPTURE.items() if key != name}
    file.write_text(json.dumps(missing))
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        read_capture(tmp_path)


PRINTS = """
import sys
from data_tools import command_line
from runner.command_line import command

for run in (command.run, lambda prints: command_line.run("name", prints)):
    try:
        run(lambda arguments: print("Größe \\N{SNOWMAN}") or 0)
    except SystemExit as end:
        print(end.code)
"""


def test_text_that_the_terminal_has_no_letters_for_is_printed_all_the_same():
    ended = subprocess.run(
        [sys.executable, "-c", PRINTS],
        env={"PATH": "", "LANG": "C", "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.stdout.splitlines() == [r"Gr\xf6\xdfe \u2603", "0"] * 2, ended.stderr
