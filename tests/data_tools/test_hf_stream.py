"""Streams against a packing written out here, bad records, and streams that fail or stall.

In shapes: B rows, S sequence, N tokens.
"""

import gc
import gzip
import itertools
import json
import os
import re
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from refusals import refusals
from sentinels import sentinels

from data_tools.hf_stream.records import StreamFailure
from data_tools.hf_stream.source import HFStream
from data_tools.tokenizer import MAX_TEXT_BYTES
from lmlib.data.resumable import gather_states
from lmlib.data.stored.metadata import TokenizerIdentity

os.environ["HF_HUB_OFFLINE"] = "1"  # before `datasets` is imported: it looks hosts up otherwise

BATCH, SEQUENCE = 4, 16
BOS, EOS = 256, 257  # of the tokenizer 'bytes'
# Documents of 0 to 60 bytes, some of several bytes a character; each is different.
TEXTS = [f"{n}:" + "aé漢😀"[n % 4] * (n * 7 % 15) for n in range(47)]


def stream(dataset, **settings):
    settings = {"batch_size": BATCH, "sequence_length": SEQUENCE, **settings}
    return HFStream(dataset, "bytes", **settings)


def framed(texts):
    return [token for text in texts for token in (BOS, *text.encode("utf-8"), EOS)]


def tokens_in(batches):
    """The first input and all targets that are not padding: what went in, if it was packed well."""
    targets = [batch.targets[batch.segment_ids > 0] for batch in batches]
    return [int(batches[0].tokens[0, 0]), *map(int, np.concatenate(targets))]


def documents_in(batches):
    """The whole documents, decoded."""
    tokens, texts = tokens_in(batches), []
    ends = [place for place, token in enumerate(tokens) if token == EOS]
    for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        assert tokens[start] == BOS
        texts.append(bytes(tokens[start + 1 : end]).decode("utf-8"))
    return texts


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def steps_of(texts):
    """Batches that hold them all."""
    return -(-(len(framed(texts)) - 1) // (BATCH * SEQUENCE))


def all_batches(source, count):
    return [source.batch(step) for step in range(count)]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    """A folder with the texts in order, in two files of different length."""
    folder = tmp_path_factory.mktemp("jsonl")
    for name, texts in (("a", TEXTS[:30]), ("b", TEXTS[30:])):
        lines = (json.dumps({"text": text, "id": 1}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """The same in one file of row groups that no block size divides."""
    import pyarrow
    import pyarrow.parquet

    file = tmp_path_factory.mktemp("parquet") / "texts.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), file, row_group_size=11)
    return str(file)


def test_rows_are_consecutive_tokens_of_the_documents_in_order(parquet):
    source = stream(parquet, repeat=False)
    assert (source.max_token_id, source.tokenizer) == (EOS, TokenizerIdentity("bytes", None))
    expected_N = np.array(framed(TEXTS))
    for step in range(steps_of(TEXTS) + 2):
        batch = source.batch(step)
        for row in range(BATCH):
            first = (step * BATCH + row) * SEQUENCE
            window = expected_N[first : first + SEQUENCE + 1]
            length = max(len(window) - 1, 0)
            np.testing.assert_array_equal(batch.tokens[row, :length], window[:-1])
            np.testing.assert_array_equal(batch.targets[row, :length], window[1:])
            np.testing.assert_array_equal(batch.loss_mask[row, :length], window[1:] != BOS)
            starts = [0, *(n for n in range(1, length) if window[n] == BOS)]
            segment = [sum(n >= start for start in starts) for n in range(length)]
            position = [n - max(s for s in starts if s <= n) for n in range(length)]
            np.testing.assert_array_equal(batch.segment_ids[row, :length], segment)
            np.testing.assert_array_equal(batch.positions[row, :length], position)
            assert not any(values[row, length:].any() for values in jax.tree.leaves(batch))


def test_folders_and_files_are_read(jsonl, tmp_path):
    files = [f"{jsonl}/a.jsonl", f"{jsonl}/b.jsonl"]
    compressed = tmp_path / "texts.jsonl.gz"
    compressed.write_bytes(gzip.compress(b"".join(Path(file).read_bytes() for file in files)))
    for dataset in (jsonl, files, f"{jsonl}/*.jsonl", str(compressed)):
        source = stream(dataset, repeat=False)
        assert documents_in(all_batches(source, steps_of(TEXTS))) == TEXTS, dataset


def test_rows_may_be_asked_for_in_pieces(jsonl):
    whole, pieces = stream(jsonl, streams=2), stream(jsonl, streams=2)
    for step in range(5):
        expected = whole.batch(step)
        for rows in (slice(3, 4), slice(0, 3), slice(1, None, 2), slice(None)):
            assert_same(pieces.batch(step, rows), jax.tree.map(lambda v, r=rows: v[r], expected))


def test_each_epoch_has_every_document_once_in_another_order(jsonl):
    source = stream(jsonl, shuffle_documents=10, seed=3)
    batches = all_batches(source, steps_of(3 * TEXTS))
    seen = documents_in(batches)[: 3 * len(TEXTS)]
    epochs = [seen[start : start + len(TEXTS)] for start in range(0, len(seen), len(TEXTS))]
    for epoch in epochs:
        for first in range(0, len(TEXTS), 10):  # shuffled within blocks
            assert sorted(epoch[first : first + 10]) == sorted(TEXTS[first : first + 10])
    assert len({tuple(epoch) for epoch in [TEXTS, *epochs]}) == 4
    other = stream(jsonl, shuffle_documents=10, seed=4)
    assert documents_in(all_batches(other, steps_of(TEXTS))) != seen[: len(TEXTS)]


def test_unshuffled_epochs_follow_each_other_without_a_gap(jsonl):
    batches = all_batches(stream(jsonl), steps_of(3 * TEXTS))
    expected = framed(4 * TEXTS)
    tokens = tokens_in(batches)
    assert tokens == expected[: len(tokens)]
    assert len(tokens) == steps_of(3 * TEXTS) * BATCH * SEQUENCE + 1


@pytest.mark.landing
@pytest.mark.parametrize(
    ("kind", "settings"),
    sentinels(
        [
            ("jsonl", {}),
            ("jsonl", {"shuffle_documents": 10}),
            ("jsonl", {"shuffle_documents": 47, "repeat": False}),
            ("jsonl", {"shuffle_documents": 5, "streams": 2}),
            ("jsonl", {"shuffle_documents": 4, "streams": 4, "repeat": False}),
            ("parquet", {"shuffle_documents": 1}),
            ("parquet", {"shuffle_documents": 10, "streams": 2}),
        ],
        lambda case: case == ("jsonl", {"shuffle_documents": 10}),
    ),
    ids=str,
)
def test_resumed_at_any_step_the_batches_are_the_same(request, kind, settings):
    dataset = request.getfixturevalue(kind)
    steps = steps_of(TEXTS) + 3  # into the next epoch, or past the end
    uninterrupted = stream(dataset, **settings)
    states, expected = [gather_states(uninterrupted.state(0))], []
    for step in range(steps):
        expected.append(uninterrupted.batch(step))
        states.append(gather_states(uninterrupted.state(step + 1)))
    resumed_state = states[0]
    for step in range(steps - 1):
        resumed = stream(dataset, **settings)
        resumed.restore(step, states[step])
        assert_same(resumed.batch(step), expected[step])
        assert_same(resumed.batch(step + 1), expected[step + 1])
        # Resumed at each step anew, from the state that a resumed stream gave.
        resumed = stream(dataset, **settings)
        resumed.restore(step, resumed_state)
        assert_same(resumed.batch(step), expected[step])
        resumed_state = gather_states(resumed.state(step + 1))


def test_streams_share_the_documents(jsonl):
    source = stream(jsonl, streams=4, repeat=False)
    batches = all_batches(source, 2 * steps_of(TEXTS))  # the streams are not equally long
    seen = []
    for row in range(4):
        rows = [jax.tree.map(lambda v, r=row: v[r : r + 1], batch) for batch in batches]
        seen += documents_in(rows)
    assert sorted(seen) == sorted(TEXTS)


def test_another_number_of_processes_continues_with_the_streams_of_the_first(jsonl):
    first = stream(jsonl, streams=2, shuffle_documents=5)
    # Two processes, each with the rows and the state of its own stream.
    halves = [stream(jsonl, streams=2, shuffle_documents=5) for _ in range(2)]
    for step in range(3):
        first.batch(step)
        halves[0].batch(step, slice(0, 2))
        halves[1].batch(step, slice(2, 4))
    states = [half.state(3) for half in halves]
    alone = stream(jsonl, shuffle_documents=5)
    alone.restore(3, states)
    for step in range(3, 8):
        assert_same(alone.batch(step), first.batch(step))


def test_batch_shape_may_change_at_a_checkpoint(jsonl):
    first = stream(jsonl, repeat=False)
    before = all_batches(first, 2)
    second = stream(jsonl, batch_size=2, sequence_length=8, repeat=False)
    second.restore(2, [first.state(2)])
    after = [second.batch(step) for step in range(2, 2 + 4 * steps_of(TEXTS))]
    assert tokens_in(before)[:-1] + tokens_in(after) == framed(TEXTS)


def test_the_first_batch_again_restarts_the_stream(jsonl):
    source = stream(jsonl)
    first = all_batches(source, 3)
    for one, other in zip(first, all_batches(source, 3), strict=True):
        assert_same(one, other)
    with pytest.raises(ValueError, match="the next step is 3, or 0 to begin again, not 7"):
        source.batch(7)
    with pytest.raises(ValueError, match="the next step is 0, or 0 to begin again, not 4"):
        stream(jsonl).batch(4)
    with pytest.raises(ValueError, match="known only after the batch of step 4, not that of 2"):
        source.state(5)


@pytest.mark.parametrize(("changed", "message"), refusals(__file__, "stream states"))
def test_a_state_of_other_settings_is_refused(jsonl, changed, message):
    source = stream(jsonl, shuffle_documents=5)
    source.batch(0)
    other = stream(jsonl, **{"shuffle_documents": 5, **changed})
    with pytest.raises(ValueError, match=message):
        other.restore(1, [source.state(1)])
    with pytest.raises(ValueError, match="from step 1, not 2"):
        source.restore(2, [source.state(1)])


@pytest.mark.parametrize("entry", ["records", "record", "token"])
def test_a_state_without_an_entry_is_refused(jsonl, entry):
    """The entry must not be read as 0, which would give batches from another place."""
    source = stream(jsonl)
    source.batch(0)
    state = json.loads(json.dumps(source.state(1)))
    del state["positions"]["0"][entry]
    with pytest.raises(ValueError, match="this is not the state of a stream"):
        stream(jsonl).restore(1, [state])


@pytest.mark.parametrize(("settings", "message"), refusals(__file__, "stream settings"))
def test_invalid_settings_are_refused(jsonl, settings, message):
    with pytest.raises(ValueError, match=message):
        stream(jsonl, **settings)


def test_a_missing_data_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot open"):
        stream(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="not a file of a known format"):
        stream([str(tmp_path / "texts.csv")])


class Texts:
    """Records from a list: what HFStream uses of a `datasets` stream. `before` may get in its way.

    `before(number)` is called before record `number` is given.
    """

    def __init__(self, records, before):
        self._records = records
        self._before = before
        self._next = 0

    def __iter__(self):
        while True:
            self._before(self._next)
            if self._next == len(self._records):
                return
            self._next += 1
            yield self._records[self._next - 1]

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state_dict):
        self._next = state_dict["next"]


def from_list(records, before=lambda number: None, **settings):
    settings = {"repeat": False, "retries": 3, "backoff_seconds": 0.0, **settings}
    return stream("a list", records=lambda index, streams: Texts(records, before), **settings)


def columns(texts):
    return [{"text": text} for text in texts]


BAD_RECORDS = [
    ({"content": "x"}, "has no column 'text'; it has 'content': choose one with --text_column"),
    ({"text": None}, "has no string in column 'text' but None"),
    ("x", "is not a JSON object but str"),
    ({"text": "a\ud800"}, "holds a lone surrogate at character 1, which UTF-8 cannot express"),
]


@pytest.mark.parametrize(("record", "problem"), BAD_RECORDS)
def test_a_record_without_a_usable_text_stops_the_stream(record, problem):
    source = from_list([*columns(TEXTS[:5]), record], shuffle_documents=4, batch_size=16)
    message = f"'a list', record 5 {problem}; on_bad_row='skip' leaves such records out"
    for _ in range(2):  # asked again, it does not go on behind it
        with pytest.raises(ValueError, match=re.escape(message)):
            source.batch(0)


def test_bad_records_are_skipped_and_reported(capsys):
    bad = [record for record, _ in BAD_RECORDS]
    records = [*bad[:1], *columns(TEXTS[:9]), *bad, *columns(TEXTS[9:]), *bad[1:]]
    source = from_list(records, on_bad_row="skip")
    batches = all_batches(source, steps_of(TEXTS))
    assert documents_in(batches) == TEXTS
    told = capsys.readouterr().err.splitlines()
    numbers = [0, *range(10, 14), *range(len(records) - 3, len(records))]
    problems = [BAD_RECORDS[0][1]] + [problem for _, problem in (*BAD_RECORDS, *BAD_RECORDS[1:])]
    assert told == [
        f"skipped: 'a list', record {number} {problem}"
        for number, problem in zip(numbers, problems, strict=True)
    ]

    # Resumed at any step, also where the next record is a bad one.
    source = from_list(records, on_bad_row="skip", shuffle_documents=4)
    for step in range(steps_of(TEXTS)):
        state, expected = source.state(step), source.batch(step)
        resumed = from_list(records, on_bad_row="skip", shuffle_documents=4)
        resumed.restore(step, [state])
        assert_same(resumed.batch(step), expected)


def test_a_text_longer_than_the_tokenizer_takes_is_named(tmp_path):
    """The fast encoder does not know the tokenizer; the limit counts bytes, not letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "é": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    limit = MAX_TEXT_BYTES
    texts = ["é a", "é" * (limit // 2 + 1), "é" * (limit // 2), "é b"]

    def source(on_bad_row):
        return HFStream(
            "a list",
            str(tmp_path),
            records=lambda index, streams: Texts(columns(texts), lambda number: None),
            **{"batch_size": 1, "sequence_length": 4, "repeat": False, "on_bad_row": on_bad_row},
        )

    message = f"'a list', record 1 has {limit + 2:,} bytes .* more than {limit:,}: cut it"
    with pytest.raises(ValueError, match=message):
        source("fail").batch(0)
    skipping = source("skip")
    assert tokens_in([skipping.batch(0), skipping.batch(1)]) == [2, 0, 1, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("records", [[], [{"text": None}] * 5])
@pytest.mark.parametrize("repeat", [False, True])
def test_a_stream_of_nothing_usable_is_an_error(records, repeat):
    """Instead of reading it for ever."""
    source = from_list(records, repeat=repeat, on_bad_row="skip", shuffle_documents=2)
    with pytest.raises(ValueError, match="'a list' has no records with a usable text"):
        source.batch(0)


@pytest.mark.parametrize("shuffle_documents", [0, 10])
def test_a_stream_that_fails_now_and_then_loses_nothing(shuffle_documents, capsys):
    failures = {5: 2, 20: 1, 21: 3, 47: 2}  # how often before record n; 47 is the end

    def fails(number):
        if failures.get(number):
            failures[number] -= 1
            raise ConnectionError(f"lost at {number}")

    count = steps_of(TEXTS)
    flaky = from_list(columns(TEXTS), fails, shuffle_documents=shuffle_documents)
    steady = from_list(columns(TEXTS), shuffle_documents=shuffle_documents)
    for one, other in zip(all_batches(flaky, count), all_batches(steady, count), strict=True):
        assert_same(one, other)
    told = capsys.readouterr().err.splitlines()
    assert told[:3] == [
        "'a list': ConnectionError: lost at 5; retry 1 of 3 in 0 s",
        "'a list': ConnectionError: lost at 5; retry 2 of 3 in 0 s",
        "'a list': ConnectionError: lost at 20; retry 1 of 3 in 0 s",
    ]
    assert len(told) == 8


def test_a_stream_that_fails_for_ever_is_given_up(capsys):
    """After pauses that grow."""
    tries = itertools.count()

    def fails(number):
        if number == 30:
            next(tries)
            raise ConnectionError("gone")

    source = from_list(columns(TEXTS), fails, shuffle_documents=10, backoff_seconds=0.001)
    message = "'a list' failed 4 times in a row, at last with ConnectionError: gone"
    with pytest.raises(StreamFailure, match=message) as raised:
        for step in itertools.count():
            source.batch(step)
    assert step > 0 and isinstance(raised.value.__cause__, ConnectionError)
    with pytest.raises(StreamFailure, match=message):  # asked again, it says so again
        source.batch(step)
    assert next(tries) == 4
    pauses = [line.rpartition(" in ")[2] for line in capsys.readouterr().err.splitlines()]
    assert pauses == ["0.001 s", "0.002 s", "0.004 s"]


def test_opening_is_retried_too():
    failures = iter([OSError("no route"), OSError("no route")])

    def opened(index, streams):
        for error in failures:
            raise error
        return Texts(columns(TEXTS), lambda number: None)

    source = stream("a list", records=opened, repeat=False, retries=2, backoff_seconds=0.0)
    assert documents_in(all_batches(source, steps_of(TEXTS))) == TEXTS


@pytest.mark.landing
def test_a_stalled_stream_is_opened_again_and_then_given_up(capsys):
    release = threading.Event()
    stalls = [20, 33]

    def stalls_once(number):
        if number in stalls:
            stalls.remove(number)
            release.wait()

    def stalls_always(number):
        if number == 20:
            release.wait()

    try:
        source = from_list(columns(TEXTS), stalls_once, stall_seconds=0.5)
        assert documents_in(all_batches(source, steps_of(TEXTS))) == TEXTS
        assert capsys.readouterr().err.splitlines() == 2 * [
            "'a list': TimeoutError: no batch arrived for 0.5 s; retry 1 of 3 in 0 s"
        ]
        source = from_list(columns(TEXTS), stalls_always, stall_seconds=0.1, retries=1)
        with pytest.raises(StreamFailure, match=r"TimeoutError: no batch arrived for 0\.1 s"):
            all_batches(source, 100)
    finally:
        release.set()


def reading_threads():
    return [thread for thread in threading.enumerate() if "'a dropped list'" in thread.name]


@pytest.mark.landing
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_source_no_longer_used_leaves_no_thread(how):
    source = stream("a dropped list", records=lambda i, n: Texts(columns(TEXTS), lambda k: None))
    source.batch(0)
    running = reading_threads()
    assert running
    if how == "closed":
        source.close()
    del source
    gc.collect()
    for thread in running:
        thread.join(60)
        assert not thread.is_alive()
