"""Batches as the inspect command shows them, against batches taken by hand."""

import re
from pathlib import Path

import numpy as np
from byte_texts import write_texts
from forked_processes import run_forked

from data_tools.inspect.batches import is_masked, row_text
from data_tools.inspect.description import decoder, describe_split
from data_tools.inspect.showing import description_text
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.data.synthetic import Synthetic


def test_rows_of_a_batch(tmp_path: Path) -> None:
    write_texts(tmp_path)
    source = FlatTokens(str(tmp_path), "train", 1, 12, seed=None)
    decode = decoder(tmp_path, source.tokenizer)
    lines = row_text(source.batch(0), 0, decode, "sequence 0 of 9").splitlines()
    assert lines[:7] == [
        "row 0 (sequence 0 of 9): 12 tokens, 10 targets in the loss",
        "  places 0 to 6: segment 1, positions 0 to 6",
        "    tokens    256   104   101   108   108   111   257",
        "    targets   104   101   108   108   111   257 (256)",
        "    │ hello",
        "  ── another document; its first token is no target in the loss ──",
        "  places 7 to 8: segment 2, positions 0 to 1",
    ]
    assert "  places 9 to 11: segment 3, positions 0 to 2" in lines


def test_rows_whose_documents_share_a_segment_are_cut_as_well(tmp_path: Path) -> None:
    write_texts(tmp_path)
    source = FlatTokens(
        str(tmp_path), "train", 1, 12, seed=None, attend_across_documents=True, epochs=1
    )
    text = row_text(source.batch(0), 0, None)
    cuts = ["places 0 to 6: segment 1", "places 7 to 8: segment 1", "places 9 to 11: segment 1"]
    assert re.findall(r"places .*: segment \d", text) == cuts
    text = row_text(source.batch(1000), 0, None)
    assert text == "row 0: 0 tokens, 0 targets in the loss\n  places 0 to 11: padding"


def test_text_of_a_conversation_that_is_no_target_is_marked(tmp_path: Path) -> None:
    writer = ShardWriter(
        tmp_path,
        "train",
        content="conversations",
        vocab_size=258,
        tokenizer=TokenizerIdentity("bytes", None),
    )
    for text, answer in (("Hi? yes.", "yes."), ("Oh no", "no")):
        mask = np.arange(len(text)) >= text.index(answer)
        writer.extend(np.array([*text.encode()]), np.array([len(text)]), 0, loss_mask=mask)
    writer.finish()
    source = FlatTokens(str(tmp_path), "train", 1, 12, seed=None)
    assert is_masked(source) and not is_masked(Synthetic(64, 2, 5))
    batch, decode = source.batch(0), decoder(tmp_path, source.tokenizer)
    text = row_text(batch, 0, decode, masked=True)
    assert [line for line in text.splitlines() if line[4:6] in ("┊ ", "│ ")] == [
        "    ┊ Hi? ",
        "    │ yes.",
        "    ┊ Oh ",
        "    │ no",
    ]
    assert text.splitlines()[0] == "row 0: 12 tokens, 6 targets in the loss"
    assert "targets (105)  (63)  (32)   121   101   115    46  (79)" in text
    assert "\033[90m    ┊ Hi? \033[0m\n    │ yes." in row_text(
        batch, 0, decode, masked=True, colours=True
    )
    described = description_text(describe_split(tmp_path / "train"))
    assert re.search(r"content +conversations\n", described)
    assert re.search(r"targets +6, 46.2% of the tokens\n", described)


def test_the_command_shows_the_batch_of_a_data_set(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    options = ["--batch_size=3", "--sequence_length=9", "--seed=4"]
    ended = run_forked(
        "-m", "data_tools.inspect", f"{tmp_path}/data", "--batch=1", "--rows=1", *options
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("step 1: 3 rows of 9 tokens, 1 shown\n\nrow 0 (sequence ")
