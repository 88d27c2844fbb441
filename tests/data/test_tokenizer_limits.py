"""How much a tokenizer.json makes of a text: the bound holds, and what is published is within."""

import base64
import contextlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from lmlib.data.text import read_tokenizer, tokenizers_errors
from lmlib.data.tokenizer_limits import (
    LONGEST_STAND_IN,
    LONGEST_TOKEN,
    MOST_NORMALIZED,
    growth,
)

LETTERS = st.text("abc ", max_size=4)
EXPRESSIONS = st.sampled_from(["", "a", ".", "[ab]+", "[^a]", " {2,}"]) | st.sampled_from(
    ["a*", "b?", "a|", "a{0,2}", "(?=c)", "^", "$", r"\b", r"a\Kb"]  # may match nothing
)
BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False,
}  # fmt: skip
BERT = {
    "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
    "strip_accents": None, "lowercase": True,
}  # fmt: skip


def replace(kind: str, pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def ctc(between: str) -> dict[str, Any]:
    return {"type": "CTC", "pad_token": "p", "word_delimiter_token": between, "cleanup": True}


REPLACES = st.builds(replace, st.just("String"), LETTERS, LETTERS) | st.builds(
    replace, st.just("Regex"), EXPRESSIONS, LETTERS
)
NORMALIZERS = (
    REPLACES
    | st.builds(lambda text: {"type": "Prepend", "prepend": text}, LETTERS)
    | st.sampled_from([{"type": "ByteLevel"}, {"type": "NFKC"}, {"type": "Lowercase"}, BERT])
)
DECODERS = (
    REPLACES
    | st.builds(lambda suffix: {"type": "BPEDecoder", "suffix": suffix}, LETTERS)
    | st.builds(lambda begin: {"type": "WordPiece", "prefix": begin, "cleanup": True}, LETTERS)
    | st.builds(ctc, LETTERS)
    | st.sampled_from([BYTE_LEVEL, {"type": "ByteFallback"}, {"type": "Fuse"}])
)


def tokenizer(vocab: dict[str, int] | None = None, **parts: Any) -> Tokenizer:
    """With these parts, nothing of which is checked."""
    words = models.WordLevel(vocab or {"a": 0}, unk_token="a")
    content = json.loads(Tokenizer(words).to_str()) | parts
    return Tokenizer.from_str(json.dumps(content))


def described(made: Tokenizer) -> dict[str, Any]:
    return json.loads(made.to_str())


@given(st.lists(NORMALIZERS, max_size=4), st.text("abc 中é", min_size=1, max_size=9))
@settings(max_examples=200)
def test_a_normalizer_makes_no_more_than_is_said(steps: list[Any], text: str) -> None:
    made = tokenizer(normalizer={"type": "Sequence", "normalizers": steps})
    normalized = ""
    with contextlib.suppress(ValueError), tokenizers_errors("it may panic"):
        normalized = made.normalizer.normalize_str(text)
    assert len(normalized) <= growth(described(made), "normalizer") * len(text)


@given(st.integers(0, 4))
def test_a_pre_tokenizer_makes_no_more_than_is_said(times: int) -> None:
    steps = [BYTE_LEVEL] * times
    made = tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    text = "\U0001f600é a"
    pieces = made.pre_tokenizer.pre_tokenize_str(text)
    most = growth(described(made), "pre_tokenizer") * len(text)
    assert sum(len(piece) for piece, _ in pieces) <= most


@given(st.lists(DECODERS, max_size=4), st.lists(LETTERS.filter(bool), min_size=1, max_size=4))
@settings(max_examples=200)
def test_a_decoder_makes_no_more_than_is_said(steps: list[Any], tokens: list[str]) -> None:
    made = tokenizer(decoder={"type": "Sequence", "decoders": steps})
    decoded = ""
    with contextlib.suppress(ValueError), tokenizers_errors("it may panic"):
        decoded = made.decoder.decode(tokens)
    assert len(decoded) <= growth(described(made), "decoder") * sum(map(len, tokens))


def charsmap(*texts: str) -> str:
    """A table of SentencePiece's with an index of nothing."""
    content = "".join(f"{text}\0" for text in texts).encode()
    return base64.b64encode(struct.pack("<II", 4, 0) + content).decode()


# As the published tokenizers have them.
LLAMA_2 = [{"type": "Prepend", "prepend": "▁"}, replace("String", " ", "▁")]
T5 = [
    {"type": "Precompiled", "precompiled_charsmap": charsmap("a", "صلى الله عليه وسلم")},
    replace("Regex", " {2,}", "▁"),
]
ALBERT = [
    replace("String", "``", '"'),
    replace("String", "''", '"'),
    {"type": "NFKD"},
    {"type": "StripAccents"},
    {"type": "Lowercase"},
    *T5,
]
SIGNS = [
    replace("String", chr(0x2100 + number), f"{number:03}") for number in range(200)
]  # of which none is in what another makes


@pytest.mark.parametrize(
    ("steps", "most"),
    [
        ([], 1),
        ([{"type": "NFC"}], 1),
        (LLAMA_2, 2),
        ([replace("String", " ", "▁")], 1),
        (T5, 18),
        (ALBERT, 18),
        ([replace("Regex", r"\s+", " "), replace("Regex", "[^\\n]\\*", "x")] * 9, 1),
        (SIGNS, 3),
    ],
)
def test_what_is_published_is_taken(steps: list[Any], most: int) -> None:
    normalizer = {"type": "Sequence", "normalizers": steps}
    assert growth({"normalizer": normalizer}, "normalizer") == most <= MOST_NORMALIZED


def test_parts_of_old_files_are_checked_in_their_new_form() -> None:
    """Old ones have no types."""
    plain = described(tokenizer())
    step = {"pattern": {"String": "a"}, "content": "aa"}
    read_tokenizer(json.dumps(plain | {"normalizer": {"normalizers": [step]}}))
    with pytest.raises(ValueError, match="its normalizer could make 256 characters of one"):
        read_tokenizer(json.dumps(plain | {"normalizer": {"normalizers": [step] * 8}}))


@pytest.mark.parametrize(
    ("vocab", "told"),
    [
        ({"a": 0, "x" * (LONGEST_TOKEN + 1): 1}, "has 10,001 characters, more than 10,000"),
        ({"a": 0, "x" * (LONGEST_STAND_IN + 1): 0}, "which stands for others, has 101"),
        ({"x" * (LONGEST_STAND_IN + 1): 0}, "which stands for others, has 101"),
    ],
)
def test_a_token_that_a_text_could_be_full_of_has_a_length(
    vocab: dict[str, int], told: str
) -> None:
    def written(vocab: dict[str, int]) -> str:
        plain = described(tokenizer())
        model = plain["model"] | {"vocab": vocab, "unk_token": next(iter(vocab))}
        return json.dumps(plain | {"model": model})

    with pytest.raises(ValueError, match=told):
        read_tokenizer(written(vocab))
    shorter = {token if token == "a" else token[:-1]: id for token, id in vocab.items()}
    read_tokenizer(written(shorter))
