"""Encoders give the ids of Hugging Face `tokenizers`, for every tokenizer and any text."""

import functools
import json
import pickle
import random
import subprocess
import sys
import sysconfig
import unicodedata
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentinels import sentinels
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.normalizers import NFC

from data_tools.encoders import make_encoder
from data_tools.encoders.byte_level import ByteLevelEncoder
from data_tools.encoders.encoder import MAX_TEXT_BYTES, HuggingFaceEncoder
from data_tools.train_tokenizer.byte_level_bpe import STYLES, train_byte_level_bpe

SPECIAL = "<|endoftext|>"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@functools.cache
def standard_library(count=20):
    """About 70 kB of source text for each of `count`, part of it not ASCII."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in folder.rglob("*.py") if "site-packages" not in file.parts)
    texts = [file.read_bytes().decode("utf-8", errors="replace") for file in files]
    beyond_ascii = [text for text in texts if not text.isascii() and len(text) < 100_000]
    return beyond_ascii[:count] + texts[: 2 * count]


@functools.cache
def multilingual():
    """Made-up words of many scripts; the same ones on every call."""
    generator = random.Random(0)
    blocks = [(0xC0, 0x17F), (0x300, 0x36F), (0x400, 0x450), (0x900, 0x970), (0x1100, 0x1200)]
    blocks += [(0x600, 0x660), (0x3040, 0x30FF), (0x4E00, 0x5000), (0xAC00, 0xAE00)]
    texts = []
    for first, last in blocks * 4:
        words = [
            "".join(chr(generator.randrange(first, last)) for _ in range(generator.randint(1, 4)))
            for _ in range(30)
        ]
        texts.append(" ".join(generator.choices(words, k=500)))
    return texts


@functools.cache
def trained(style):
    """A tokenizer.json of 4000 ids, of the kind that GPT-2, Llama 3 or Qwen 2 has."""
    texts = standard_library() + multilingual()
    made = train_byte_level_bpe(texts, 4000, style=style, special_tokens=[SPECIAL])
    tokenizer = tokenizers.Tokenizer.from_str(made.tokenizer_json)
    tokenizer.add_special_tokens(["<|im_end|>"])
    if style == "qwen2":
        tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return changed(tokenizer.to_str(), ignore_merges=style == "llama3")


def changed(tokenizer_json, **parts):
    """The tokenizer.json with parts of its model, or else of itself, replaced."""
    content = json.loads(tokenizer_json)
    for name, value in parts.items():
        (content["model"] if name in content["model"] else content)[name] = value
    return json.dumps(content)


def byte_level(merges, **parts):
    """A GPT-2-like tokenizer.json of the 256 bytes and these merges, ids in their order."""
    tokens = dict.fromkeys([*ALPHABET, *(left + right for left, right in merges)])
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return changed(tokenizer.to_str(), **parts)


def reference(tokenizer_json, texts):
    """The ids that `tokenizers` itself gives."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def assert_same_ids(encoder, tokenizer_json, texts):
    """The encoder gives the ids that `tokenizers` itself gives."""
    encoded = encoder.encode(texts)
    assert len(encoded) == len(texts) and all(ids.dtype == np.uint32 for ids in encoded)
    for text, ids, expected in zip(texts, encoded, reference(tokenizer_json, texts), strict=True):
        # Compared as arrays: a list of a million ids would make a huge message.
        assert np.array_equal(ids, np.array(expected, np.uint32)), text[:200]


@functools.cache
def encoder(style):
    return make_encoder(trained(style))


CHARACTERS = st.characters(exclude_categories=["Cs"])  # any code point, unassigned ones too
HOSTILE = st.lists(
    st.one_of(
        st.text(CHARACTERS, max_size=5),
        st.text(st.characters(categories=["Mn", "Mc", "Lo"]), max_size=5),
        st.text(st.sampled_from(" \n\r\t\v\f\x1c\x85\xa0\u2000\u2028\u3000"), max_size=6),
        st.sampled_from(["'ſ", "'S", "'LL", "'lL", "'Re", "'VE", "'m", "''t", "don't", "'ﬆ"]),
        st.sampled_from([SPECIAL, "<|im_end|>", "<think>", "<think", "</think>", "think>\u0338"]),
        st.builds(lambda c, n: c * n, CHARACTERS, st.integers(1, 300)),
        st.binary(max_size=8).map(lambda octets: octets.decode("utf-8", errors="replace")),
        st.sampled_from(["1", "12", "1234567", "a", "Hello", " world", "e\u0301", "각"]),
    ),
    max_size=12,
).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=50)
@given(texts=st.lists(HOSTILE, max_size=3))
def test_hostile_text(style, texts):
    assert_same_ids(encoder(style), trained(style), texts)


@pytest.mark.parametrize(
    ("style", "files"),
    sentinels([("qwen2", 20), *((style, 60) for style in STYLES)], landing=("qwen2", 20).__eq__),
)
def test_real_text_and_round_trip(style, files):
    assert isinstance(encoder(style), ByteLevelEncoder)
    texts = standard_library(files) + multilingual()
    assert_same_ids(encoder(style), trained(style), texts)
    tokenizer = tokenizers.Tokenizer.from_str(trained(style))
    for text, ids in zip(texts[:50], encoder(style).encode(texts[:50]), strict=True):
        expected = unicodedata.normalize("NFC", text) if style == "qwen2" else text
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == expected


@functools.cache
def all_pairs(style):
    """A tokenizer in which any two bytes merge unless a cut is between them: it shows the cuts."""
    merges = list(product(ALPHABET, repeat=2))
    random.Random(0).shuffle(merges)
    return changed(byte_level(merges), pre_tokenizer=json.loads(trained(style))["pre_tokenizer"])


@pytest.mark.slow
@pytest.mark.parametrize("style", ["gpt2", "llama3"])
def test_every_code_point_is_cut_alike(style):
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    texts = ["".join(f"{c}1" for c in characters[i : i + 5000]) for i in range(0, 1 << 20, 5000)]
    # All neighbours for a part: the lower ones, and where a class begins.
    category = [unicodedata.category(c)[0] for c in characters]
    first = [c for c, a, b in zip(characters[1:], category, category[1:], strict=False) if a != b]
    for c in [*characters[:0x300], *first]:
        texts.append(f"{c}a{c}{c} {c} 1{c}12{c}{c}'{c}'{c}t\n{c}\n{c}!{c}\r\n {c}'l{c}'s{c}  {c}")
    fast = make_encoder(all_pairs(style))
    assert isinstance(fast, ByteLevelEncoder)
    assert_same_ids(fast, all_pairs(style), texts)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_texts_longer_than_a_chunk_and_long_runs(style):
    text = "".join(multilingual() + standard_library())[: 5 << 19]
    runs = [run * 100_000 + " end" for run in ("a", "0", "中", "!", "'s", "가", "é")]
    texts = [text, text.replace(" ", "")[: 3 << 19], *runs]
    assert_same_ids(encoder(style), trained(style), texts)


@pytest.mark.landing
@pytest.mark.parametrize(
    ("style", "run"),
    sentinels(
        [
            *product(["gpt2", "llama3"], [" ", "\n", "\t\r\n "]),
            ("llama3", "\u3000"),
            ("qwen2", "\t"),
        ],
        lambda case: case == ("llama3", "\t\r\n "),
    ),
)
def test_long_whitespace(style, run):
    repeated = run * (1_010_000 // len(run))  # fancy-regex gives up at a million
    assert_same_ids(encoder(style), trained(style), [f"a {repeated}b", f"!{repeated}"])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_large_text_takes_little_memory():
    script = """
import re, sys
from pathlib import Path
from data_tools.encoders import make_encoder
encoder = make_encoder(sys.stdin.read())
text = "The quick brown fox jumps over the lazy dog. It's 1234 o'clock!\\n" * (1 << 19)
(ids,) = encoder.encode([text])
peak = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())
print(len(text), len(ids), int(peak.group(1)) // 1024)
"""
    command = [sys.executable, "-c", script]
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, input=trained("llama3"), capture_output=True, text=True, check=True, env=path
    )
    size, count, mebibytes = map(int, done.stdout.split())
    assert size > 30e6 and count > 5e6 and mebibytes < 700


MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("l", "o"), ("lo", "w")]
TEXTS = [
    "abcd low lowab ab cdab",
    "",
    "ABCD \u1e9b\u0323 é",
    "x<keep> y < keep> <keep>abcd",
    " abcd",
]


def added(**parts):
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return [{"id": 300, "content": "<keep>", **flags, **parts}]


# Of a tokenizer.json: features that the fast engine does not have.
FEATURES = json.loads(Path(__file__).with_name("other_features.json").read_text())


@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_other_features_fall_back(feature):
    tokenizer_json = byte_level(MERGES, **feature)
    chosen = make_encoder(tokenizer_json)
    # Settings without an effect need not fall back.
    if feature not in ({"continuing_subword_prefix": ""}, {"dropout": 0.0}):
        assert isinstance(chosen, HuggingFaceEncoder)
    assert_same_ids(pickle.loads(pickle.dumps(chosen)), tokenizer_json, TEXTS)


def test_other_models_fall_back():
    word_level = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    short = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    short.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for tokenizer in (word_level, short):
        chosen = make_encoder(tokenizer.to_str())
        assert isinstance(chosen, HuggingFaceEncoder)
        assert_same_ids(chosen, tokenizer.to_str(), ["ab", "a", "ba"])


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize(
    ("name", "merges", "more_tokens", "fast"),
    [
        ("plain", MERGES, [], {False, True}),
        ("two splits together", [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")], [], {0, 1}),
        ("two splits apart", [("b", "c"), ("a", "bc"), ("a", "b"), ("ab", "c")], [], set()),
        ("a part that is made later", [("a", "b"), ("abc", "d"), ("ab", "c")], [], {0, 1}),
        ("three pieces", MERGES, ["xyz"], {0, 1}),
        ("two pieces that do not merge", MERGES, ["abx", "dc"], {False}),
        ("merges that never apply", [("b", "c"), ("a", "b"), ("ab", "c")], [], {False}),
        ("token that hides a longer one", [("a", "b"), ("c", "d"), ("b", "c")], ["abcd"], {0}),
        ("not made of bytes", MERGES, ["词", "a b"], {0, 1}),
    ],
)
def test_merges(ignore_merges, name, merges, more_tokens, fast):
    vocabulary = json.loads(byte_level(merges))["model"]["vocab"]
    for token in more_tokens:
        vocabulary[token] = len(vocabulary)
    reversed_ids = {token: len(vocabulary) - 1 - place for token, place in vocabulary.items()}
    letters = ["".join(word) for length in range(1, 6) for word in product("abcd", repeat=length)]
    texts = [*letters, *TEXTS, "xyz", "abx", "dc", "xyzabx abxdc dc xyz", " ".join(letters[::-1])]
    for vocab in (vocabulary, reversed_ids):
        tokenizer_json = byte_level(merges, vocab=vocab, ignore_merges=ignore_merges)
        chosen = make_encoder(tokenizer_json)
        assert isinstance(chosen, ByteLevelEncoder) == (ignore_merges in fast), name
        assert_same_ids(chosen, tokenizer_json, texts)


@settings(max_examples=30)
@given(
    merges=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12, unique=True
    ),
    ignore_merges=st.booleans(),
)
def test_any_merges(merges, ignore_merges):
    tokens = ["a", "b", "c"]
    named = []
    for left, right in merges:
        named.append((tokens[left % len(tokens)], tokens[right % len(tokens)]))
        tokens.append("".join(named[-1]))
    tokenizer_json = byte_level(list(dict.fromkeys(named)), ignore_merges=ignore_merges)
    texts = ["".join(word) for length in range(1, 7) for word in product("abc", repeat=length)]
    assert_same_ids(make_encoder(tokenizer_json), tokenizer_json, texts)


@settings(max_examples=100)
@given(
    parts=st.lists(
        st.sampled_from(["<x>", "<xy>", "y>", "<S>", "S", "<N>", "N≯", "ab", "<"]), max_size=9
    )
)
def test_added_tokens_in_text(parts):
    text = "".join(parts)
    entries = [
        *added(id=300, content="<x>"),
        *added(id=301, content="<x><xy>"),
        *added(id=302, content="<S>", special=True),
        *added(id=303, content="<S>S<N>"),
        *added(id=304, content="<N>", normalized=True),
        *added(id=305, content="y><", special=True),
    ]
    tokenizer_json = byte_level(MERGES, added_tokens=entries)
    chosen = make_encoder(tokenizer_json)
    assert isinstance(chosen, ByteLevelEncoder)
    assert_same_ids(chosen, tokenizer_json, [text, f"a{text} "])


def test_bad_texts_are_named():
    slow = make_encoder(byte_level(MERGES, normalizer={"type": "NFKC"}))
    with pytest.raises(ValueError, match=r"has .* cut it"):
        slow.encode(["a", "é" * (MAX_TEXT_BYTES // 2 + 1)])
    for chosen in (slow, encoder("gpt2"), make_encoder(None)):
        with pytest.raises(ValueError, match=r"holds a lone surrogate at character 2"):
            chosen.encode(["fine", "ab\ud800"])
    with pytest.raises(ValueError, match=r"not a valid tokenizer\.json"):
        make_encoder("{}")


@pytest.mark.landing
@pytest.mark.parametrize("style", ["gpt2", "llama3"])
@pytest.mark.parametrize("character", ["a", "é", " ", "!", "\n", "1"])
def test_runs_that_take_too_much_memory_are_refused(style, character):
    mixed = (character * 1000 + "x 1") * 3000  # long, but no run is
    assert encoder(style).size(mixed) == len(mixed.encode())
    run = "start" + character * (2 << 20)
    if (style, character) == ("llama3", "1"):  # where a pre-token has three numbers at most
        assert encoder(style).size(run) == len(run)
        return
    with pytest.raises(ValueError, match=r"has more than 1,048,576 characters of one kind"):
        encoder(style).size(run)


def test_python_and_tokenizers_agree_on_normalized_text():
    """A mark between the two others would be reordered, so that they reveal every change."""
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    probes = [probe for c in characters for probe in (c, f"\u0345{c}\u0334", f"a{c}", f"\u1100{c}")]
    kept = [probe for probe in probes if unicodedata.is_normalized("NFC", probe)]
    assert len(kept) > len(probes) // 2
    assert NFC().normalize_str("\n".join(kept)) == "\n".join(kept)
