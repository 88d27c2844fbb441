"""Fill-in-the-middle: every part is there once, in one of two orders, as often as was asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.pretokenize.fill_in_the_middle import TOKENS, FillInTheMiddle
from data_tools.pretokenize.texts import pretokenize
from data_tools.tokenizer import ByteTokenizer, JsonTokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib.data.stored.metadata import read_split

SUFFIX = TOKENS[0][2]


def tokenizer(tokens=TOKENS[0]):
    made = train_byte_level_bpe(
        ["def f(x): return x"], 300, special_tokens=["<|endoftext|>", *tokens]
    )
    return made if isinstance(made, JsonTokenizer) else JsonTokenizer("made", made)


PLAIN = tokenizer()


@given(st.text(st.sampled_from("abc é🤖\n"), max_size=30), st.sampled_from([0.0, 1.0]))
def test_a_document_has_all_its_parts(text, spm_rate):
    (ids,) = FillInTheMiddle(PLAIN, 1.0, spm_rate).encode_batch([text])
    prefix, middle, suffix = (PLAIN.id_of(name) for name in TOKENS[0])
    at = {name: np.flatnonzero(ids == name).tolist() for name in (prefix, middle, suffix)}
    assert at[prefix] == [0] and len(at[middle]) == len(at[suffix]) == 1
    first, second, third = np.split(ids, [at[suffix][0], at[middle][0]])
    end, rest = PLAIN.decode(second[1:]), PLAIN.decode(third[1:])
    if spm_rate:
        assert len(first) == 1
        assert rest + end == text
    else:
        assert PLAIN.decode(first[1:]) + rest + end == text
    again = FillInTheMiddle(PLAIN, 1.0, spm_rate).encode_batch(["other", text])[1]
    np.testing.assert_array_equal(again, ids)


def test_rates_are_those_that_were_asked_for():
    texts = [f"document number {number}" for number in range(4000)]
    encoded = FillInTheMiddle(PLAIN, 0.4, 0.25).encode_batch(texts)
    plain = PLAIN.encode_batch(texts)
    cut = [ids for ids, other in zip(encoded, plain, strict=True) if not np.array_equal(ids, other)]
    assert abs(len(cut) / 4000 - 0.4) < 0.03  # four standard errors
    # A PSM document with an empty beginning looks like SPM: about one in eleven.
    orders = [ids[1] == PLAIN.id_of(SUFFIX) for ids in cut]
    assert abs(np.mean(orders) - (0.25 + 0.75 * (1 / len(texts[-1]) * 2))) < 0.06
    places = [text_places(ids) for ids in cut if ids[1] != PLAIN.id_of(SUFFIX)]
    assert abs(np.mean(places) - 1 / 3) < 0.03  # of the document is its beginning


def text_places(ids):
    beginning = PLAIN.decode(ids[1 : np.flatnonzero(ids == PLAIN.id_of(SUFFIX))[0]])
    return len(beginning) / len(PLAIN.decode(ids))


def test_it_is_in_the_record_and_shards_agree(tmp_path):
    texts = [f"text {number}" * 9 for number in range(50)]
    for name, shards in (("one", 1), ("two", 1)):
        pretokenize(texts, FillInTheMiddle(PLAIN, 0.5), tmp_path / name, "train", shards=shards)
    made = read_split(tmp_path / "one/train").shards[0]
    assert made.source["fim_rate"] == 0.5
    assert made.source["fim_tokens"] == list(TOKENS[0])
    assert made.bytes == sum(map(len, texts))
    with pytest.raises(FileExistsError, match="fim_rate"):
        pretokenize(texts, FillInTheMiddle(PLAIN, 0.6), tmp_path / "one", "train")


def test_names_of_tokens_may_be_given():
    other = tokenizer(("<p>", "<m>", "<s>"))
    (ids,) = FillInTheMiddle(other, 1.0, 1.0, ("<p>", "<m>", "<s>")).encode_batch(["ab"])
    assert ids[:2].tolist() == [other.id_of("<p>"), other.id_of("<s>")]
    for made, names in ((other, None), (PLAIN, ("<p>", "<m>", "<s>")), (ByteTokenizer(), None)):
        with pytest.raises(ValueError, match="has no three tokens"):
            FillInTheMiddle(made, 1.0, 0.5, names)
    with pytest.raises(ValueError, match=r"fim_rate must be in \[0, 1\], not 2"):
        FillInTheMiddle(PLAIN, 2)
