import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_tools.pretokenize import pretokenize
from data_tools.tokenizer import ByteTokenizer, train_byte_level_bpe
from lmlib.data import FlatTokens, FlatTokensWriter, read_metadata

TEXTS = ["hello", "", "ünï 🤖", "x" * 100]
BOS, EOS = 256, 257
REPOSITORY = Path(__file__).parents[2]


def tokens_of(path: Path, split: str = "train") -> list[int]:
    """All tokens of a split, in order."""
    source = FlatTokens(str(path), split, 1, 16, seed=None)
    batches = [source.batch(step) for step in range(source.steps_per_epoch)]
    targets = [batch.targets[batch.segment_ids > 0] for batch in batches]
    return [int(batches[0].tokens[0, 0]), *np.concatenate(targets).tolist()]


def test_documents_are_framed_and_counted(tmp_path: Path) -> None:
    source = {"dataset": "by hand"}
    metadata = pretokenize(TEXTS, ByteTokenizer(), tmp_path, "train", source=source)
    framed = [[BOS, *text.encode(), EOS] for text in TEXTS]
    assert tokens_of(tmp_path) == list(itertools.chain(*framed))
    assert metadata == read_metadata(tmp_path / "train")
    assert metadata.documents == 4
    assert metadata.bytes == sum(len(text.encode()) for text in TEXTS)
    assert (metadata.vocab_size, metadata.max_token_id) == (258, 257)
    assert (metadata.bos_id, metadata.eos_id) == (BOS, EOS)
    assert metadata.source == source
    assert metadata.gzip_bytes is None


def test_gzip_baseline(tmp_path: Path) -> None:
    metadata = pretokenize(TEXTS, ByteTokenizer(), tmp_path, "train", source={}, gzip_baseline=True)
    assert metadata.gzip_bytes == sum(len(gzip.compress(text.encode(), 9)) for text in TEXTS)


def test_the_tokenizer_is_kept(tmp_path: Path) -> None:
    tokenizer = train_byte_level_bpe(TEXTS, 260)
    pretokenize(TEXTS, tokenizer, tmp_path, "train", source={})
    source = FlatTokens(str(tmp_path), "train", 1, 4)
    assert source.tokenizer_path == tmp_path / "tokenizer.json"
    assert source.tokenizer_path.read_text(encoding="utf-8") == tokenizer.tokenizer_json
    assert source.metadata.tokenizer == tokenizer.identity

    source.tokenizer_path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json has sha256"):
        FlatTokens(str(tmp_path), "train", 1, 4)


def test_max_tokens_ends_with_a_whole_document(tmp_path: Path) -> None:
    metadata = pretokenize(TEXTS, ByteTokenizer(), tmp_path, "train", source={}, max_tokens=8)
    assert (metadata.documents, metadata.tokens) == (2, 9)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        pretokenize(TEXTS, ByteTokenizer(), tmp_path, "more", source={}, max_tokens=0)


def test_progress_counts_up(tmp_path: Path) -> None:
    calls: list[tuple[int, int, int]] = []
    pretokenize(
        ["abc"] * 3000,
        ByteTokenizer(),
        tmp_path,
        "train",
        source={},
        progress=lambda *counts: calls.append(counts),
    )
    assert calls == [(n, 5 * n, 3 * n) for n in (1024, 2048, 3000)]


def test_errors_leave_the_split_unfinished(tmp_path: Path) -> None:
    for texts, message in (
        (["good", "bad \ud800"], "document 1 holds a lone surrogate"),
        ([], "no"),
    ):
        with pytest.raises(ValueError, match=message):
            pretokenize(texts, ByteTokenizer(), tmp_path, "train", source={})
        with pytest.raises(FileNotFoundError, match="unfinished"):
            read_metadata(tmp_path / "train")
    pretokenize(["good"], ByteTokenizer(), tmp_path, "train", source={})
    assert tokens_of(tmp_path) == [BOS, *b"good", EOS]


def test_special_tokens_in_documents_never_split_them(tmp_path: Path) -> None:
    tokenizer = train_byte_level_bpe(TEXTS, 260)
    text = "quoting <|end_of_text|> and <|begin_of_text|>"
    pretokenize([text], tokenizer, tmp_path, "train", source={})
    ids = tokens_of(tmp_path)
    assert (ids.count(0), ids.count(1)) == (1, 1)
    assert tokenizer.decode(ids) == text


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "data_tools.pretokenize", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("first")
    (tmp_path / "texts" / "b.txt").write_text("second")
    (tmp_path / "texts" / "c.bin").write_bytes(b"\xff")
    out = tmp_path / "out"
    arguments = [f"--dataset={tmp_path / 'texts'}", "--tokenizer=bytes", f"--out={out}"]
    arguments += ["--pattern=*.txt", "--gzip_baseline", "--max_tokens=1e9"]
    done = command_line(*arguments)
    assert done.returncode == 0, done.stderr
    assert tokens_of(out) == [BOS, *b"first", EOS, BOS, *b"second", EOS]
    assert json.loads((out / "train" / "metadata.json").read_text())["gzip_bytes"] > 0
    for entry in ("documents         2\n", "tokens            15\n", "bits per byte"):
        assert entry in done.stdout

    again = command_line(*arguments)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert again.stderr.startswith("pretokenize: ") and "already finished" in again.stderr


def test_the_writer_frames_like_pretokenize(tmp_path: Path) -> None:
    pretokenize(["ab"], ByteTokenizer(), tmp_path / "one", "train", source={})
    writer = FlatTokensWriter(tmp_path / "two", "train", vocab_size=258, bos_id=BOS, eos_id=EOS)
    writer.append(np.array(list(b"ab")), 2)
    writer.finish()
    assert tokens_of(tmp_path / "one") == tokens_of(tmp_path / "two")


def test_the_documented_example(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "flat-tokens.md").read_text(encoding="utf-8")
    documented = page.split("```json\n")[1].split("```")[0]
    source = json.loads(documented)["source"]
    pretokenize(["hi", "a"], ByteTokenizer(), tmp_path, "train", source=source)
    assert (tmp_path / "train" / "metadata.json").read_text() == documented
