"""Streams of bad records, and streams that fail or stall, against lists of texts."""

import gc
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from streamed_texts import (
    TEXTS,
    all_batches,
    assert_same,
    documents_in,
    steps_of,
    stream,
    tokens_in,
)

from data_tools.encoders.encoder import MAX_TEXT_BYTES
from data_tools.hf_stream.records import StreamFailure
from data_tools.hf_stream.source import HFStream


class Texts:
    """Records from a list: what HFStream uses of a `datasets` stream. `before` may get in its way.

    `before(number)` is called before record `number` is given.
    """

    def __init__(self, records: Sequence[Any], before: Callable[[int], None]) -> None:
        self._records = records
        self._before = before
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._before(self._next)
            if self._next == len(self._records):
                return
            self._next += 1
            yield self._records[self._next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]


def from_list(
    records: Sequence[Any], before: Callable[[int], None] = lambda number: None, **settings: Any
) -> HFStream:
    settings = {"repeat": False, "retries": 3, "backoff_seconds": 0.0, **settings}
    return stream("a list", records=lambda index, streams: Texts(records, before), **settings)


def columns(texts: list[str]) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


BAD_RECORDS = [
    ({"content": "x"}, "has no column 'text'; it has 'content': choose one with --text_column"),
    ({"text": None}, "has no string in column 'text' but None"),
    ("x", "is no JSON object but str"),
    (
        {"text": "a\ud800"},
        "holds a lone surrogate at character 1, which UTF-8 cannot express",
    ),
]


@pytest.mark.parametrize(("record", "problem"), BAD_RECORDS)
def test_a_record_without_a_usable_text_stops_the_stream(record: Any, problem: str) -> None:
    source = from_list([*columns(TEXTS[:5]), record], shuffle_documents=4, batch_size=16)
    message = f"'a list', record 5 {problem}; on_bad_row='skip' leaves such records out"
    for _ in range(2):  # asked again, it does not go on behind it
        with pytest.raises(ValueError, match=re.escape(message)):
            source.batch(0)


def test_bad_records_are_left_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
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
    source, states = from_list(records, on_bad_row="skip", shuffle_documents=4), []
    expected = []
    for step in range(steps_of(TEXTS)):
        states.append(source.state(step))
        expected.append(source.batch(step))
    for step, state in enumerate(states):
        resumed = from_list(records, on_bad_row="skip", shuffle_documents=4)
        resumed.restore(step, [state])
        assert_same(resumed.batch(step), expected[step])


def test_a_text_longer_than_the_tokenizer_takes_is_named(tmp_path: Path) -> None:
    """With a tokenizer that the fast encoder does not know; the limit is of bytes, not letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "é": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    limit = MAX_TEXT_BYTES
    texts = ["é a", "é" * (limit // 2 + 1), "é" * (limit // 2), "é b"]

    def source(on_bad_row: str) -> HFStream:
        return HFStream(
            "a list",
            str(tmp_path),
            batch_size=1,
            sequence_length=4,
            repeat=False,
            on_bad_row=on_bad_row,
            records=lambda index, streams: Texts(columns(texts), lambda number: None),
        )

    message = f"'a list', record 1 has {limit + 2:,} bytes .* at most {limit:,} at once: cut it"
    with pytest.raises(ValueError, match=message):
        source("fail").batch(0)
    skipping = source("skip")
    assert tokens_in([skipping.batch(0), skipping.batch(1)]) == [2, 0, 1, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("records", [[], [{"text": None}] * 5])
@pytest.mark.parametrize("repeat", [False, True])
def test_a_stream_of_nothing_usable_is_an_error(records: list[Any], repeat: bool) -> None:
    """Instead of reading it for ever."""
    source = from_list(records, repeat=repeat, on_bad_row="skip", shuffle_documents=2)
    with pytest.raises(ValueError, match="'a list' has no records with a usable text"):
        source.batch(0)


@pytest.mark.parametrize("shuffle_documents", [0, 10])
def test_a_stream_that_fails_now_and_then_loses_nothing(
    shuffle_documents: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {5: 2, 20: 1, 21: 3, 47: 2}  # how often before record n; 47 is the end

    def fails(number: int) -> None:
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


def test_pauses_grow(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(number: int) -> None:
        raise ConnectionError("no network")

    with pytest.raises(StreamFailure):
        from_list([], fails, backoff_seconds=0.001).batch(0)
    told = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" in ")[2] for line in told] == ["0.001 s", "0.002 s", "0.004 s"]


def test_a_stream_that_fails_for_ever_is_given_up() -> None:
    tries = itertools.count()

    def fails(number: int) -> None:
        if number == 30:
            next(tries)
            raise ConnectionError("gone")

    source = from_list(columns(TEXTS), fails, shuffle_documents=10)
    message = "'a list' failed 4 times in a row, at last with ConnectionError: gone"
    with pytest.raises(StreamFailure, match=message) as raised:
        for step in itertools.count():
            source.batch(step)
    assert step > 0
    assert isinstance(raised.value.__cause__, ConnectionError)
    with pytest.raises(StreamFailure, match=message):  # asked again, it says so again
        source.batch(step)
    assert next(tries) == 4


def test_opening_is_retried_too() -> None:
    failures = iter([OSError("no route"), OSError("no route")])

    def opened(index: int, streams: int) -> Texts:
        for error in failures:
            raise error
        return Texts(columns(TEXTS), lambda number: None)

    source = stream("a list", records=opened, repeat=False, retries=2, backoff_seconds=0.0)
    assert documents_in(all_batches(source, steps_of(TEXTS))) == TEXTS


@pytest.mark.landing
def test_a_stalled_stream_is_opened_again_and_then_given_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    release = threading.Event()
    stalls = [20, 33]

    def stalls_once(number: int) -> None:
        if number in stalls:
            stalls.remove(number)
            release.wait()

    def stalls_always(number: int) -> None:
        if number == 20:
            release.wait()

    try:
        source = from_list(columns(TEXTS), stalls_once, stall_seconds=0.5)
        assert documents_in(all_batches(source, steps_of(TEXTS))) == TEXTS
        assert capsys.readouterr().err.splitlines() == 2 * [
            "'a list': TimeoutError: nothing came for 0.5 s; retry 1 of 3 in 0 s"
        ]
        source = from_list(columns(TEXTS), stalls_always, stall_seconds=0.1, retries=1)
        with pytest.raises(StreamFailure, match=r"TimeoutError: nothing came for 0\.1 s"):
            all_batches(source, 100)
    finally:
        release.set()


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "'a dropped list'" in thread.name]


@pytest.mark.landing
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_source_no_longer_used_leaves_no_thread(how: str) -> None:
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
