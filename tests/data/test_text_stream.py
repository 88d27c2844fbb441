"""Text that comes in pieces is the text as a whole."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmlib.data.text import codec_of_bytes, codec_of_json
from lmlib.data.text_stream import StopStrings, TextStream

WORDS = ["▁", "▁a", "b", "▁the", "é", "�", "日本"]


def byte_level():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id for id, token in enumerate([*letters, "Ġthe", "æĹ", "¥æ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_fallback(decoder):
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {token: id for id, token in enumerate(names)}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return tokenizer


@functools.cache
def codec(kind):
    if kind == "bytes":
        return codec_of_bytes(bos_id=None)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made = {
        "byte-level": byte_level,
        "SentencePiece": lambda: with_fallback(
            decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
        ),
        "metaspace": lambda: with_fallback(
            decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        ),
    }
    tokenizer = made[kind]()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["plain"])
    return codec_of_json(tokenizer.to_str(), kind, bos_id=None)


KINDS = ["byte-level", "SentencePiece", "metaspace", "bytes"]


def streamed(kind, ids, cuts, kept):
    stream = TextStream(codec(kind), kept)
    places = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    shown = [stream.push(ids[begin:end]) for begin, end in itertools.pairwise(places)]
    return [*shown, stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(data=st.data())
def test_the_pieces_are_the_whole(kind, data):
    some_ids = st.lists(st.integers(0, 275), max_size=4)
    parts = data.draw(st.lists(st.one_of(st.text(max_size=8), some_ids), max_size=8))
    encode = codec(kind).encode_marked
    ids = [id for part in parts for id in (encode(part) if isinstance(part, str) else part)]
    cuts = data.draw(st.one_of(st.just(set(range(len(ids)))), st.sets(st.integers(0, len(ids)))))
    shown = streamed(kind, ids, cuts, kept=data.draw(st.integers(1, 8)))
    assert "".join(shown) == codec(kind).decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_is_shown_as_soon_as_it_is_whole(kind):
    ids = codec(kind).encode_marked("é😀b日b")
    shown = streamed(kind, ids, set(range(len(ids))), kept=4)
    assert "".join(shown) == "é😀b日b"
    assert all(len(piece) <= 2 for piece in shown)
    assert shown[-1] == ""


def test_invalid_bytes_are_not_held_back_forever():
    stream = TextStream(codec("byte-level"))
    wrong = codec("byte-level").encode_marked("é")[1:]
    assert stream.push(wrong * 5) == "�" * 4
    assert stream.finish() == "�"


def test_a_continuation_keeps_the_space_before_its_first_word():
    stream, the = TextStream(codec("SentencePiece")), 1 + 256 + WORDS.index("▁the")
    assert [stream.push([the]) for _ in range(3)] == ["the", " the", " the"]


def expected(text, strings):
    """The text before the stop string that is complete first, and that string."""
    for end in range(1, len(text) + 1):
        there = [string for string in strings if text[:end].endswith(string)]
        if there:
            return text[: end - max(map(len, there))], max(there, key=len)
    return text, None


@settings(max_examples=200)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    strings=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop_string(pieces, strings):
    stops, shown = StopStrings(strings), ""
    for number, piece in enumerate(pieces):
        shown += stops.push(piece)
        there, found = expected("".join(pieces[: number + 1]), strings)
        assert stops.found == found
        assert there.startswith(shown)
        if found is None:  # all is shown but what may be the beginning of a stop string
            held = there[len(shown) :]
            assert not held or any(string.startswith(held) for string in strings)
    assert (shown + stops.finish(), stops.found) == expected("".join(pieces), strings)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])
