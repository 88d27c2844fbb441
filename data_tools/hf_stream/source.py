"""Training batches streamed from a Hugging Face data set, to try one out.

Shape suffix: B batch (rows).
"""

import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from data_tools.hf_stream import records as hf_records
from data_tools.hf_stream.records import OpenRecords, Patience, SteadyRecords
from data_tools.hf_stream.tokens import (
    BEGINNING,
    DOCUMENTS_AT_A_TIME,
    Documents,
    Position,
    TokenStream,
)
from data_tools.rows.block import SkippedRows, TextField
from data_tools.tokenizer import load_tokenizer
from lmlib.data.batch import Batch
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.text import TextCodec, codec_of_bytes, codec_of_json

LAST_READ_SECONDS = 2.0  # for a pending read when a source is closed
ARROW_SECONDS = 0.1  # for Arrow's threads after that


class HFStream:
    """A `Source` and `Resumable` that downloads and tokenizes a data set while a run trains on it.

    The data set is split into `streams`, by files if their number allows and otherwise record by
    record. Each stream fills an equal share of the batch's rows with its documents, packed without
    a gap (`TokenStream`), and ends in padding without `repeat`. A batch depends on the number of
    streams, but not on processes or devices, so a resumed run gets the same batches at any step.
    Batches must be requested in order; the first one again restarts the streams. A data set that
    changes on the Hub continues at the same position in other files, without an error.
    """

    batches = bytes_per_target = None  # known only after reading

    def __init__(
        self,
        dataset: str | Sequence[str],
        tokenizer: str,
        batch_size: int,
        sequence_length: int,
        name: str | None = None,
        split: str = "train",
        text_column: str = "text",
        shuffle_documents: int = 0,
        seed: int = 0,
        repeat: bool = True,
        streams: int | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        on_bad_row: Literal["fail", "skip"] = "fail",
        stall_seconds: float = 120.0,
        retries: int = 5,
        backoff_seconds: float = 1.0,
        records: OpenRecords | None = None,
    ) -> None:
        """Loads the tokenizer and opens the data set; reads nothing yet.

        Args:
          dataset, name, split: a name on the Hub, a folder, or files; see `open_records`.
          tokenizer, bos_token, eos_token: as for `load_tokenizer`.
          shuffle_documents: documents in the blocks, held in memory, that are shuffled; 0 keeps the
            stored order.
          repeat: True restarts a stream after its end.
          streams: `None` for one per process, or the number in the checkpoint.
          on_bad_row: raise ValueError for a record whose text cannot be encoded, or skip it.
          stall_seconds: time without a record after which a stream is opened again.
          retries: consecutive retries before `batch` raises `StreamFailure`.
          backoff_seconds: before the first retry, doubled for each further one up to a minute.
          records: opens stream i of n instead of `dataset`, which is then only a name.

        Raises ValueError for invalid settings, or a tokenizer or data set that cannot be opened.
        """
        for setting, value, least in (
            ("batch_size", batch_size, 1),
            ("sequence_length", sequence_length, 1),
            ("shuffle_documents", shuffle_documents, 0),
            ("seed", seed, 0),
            ("stall_seconds", stall_seconds, 1e-3),
            ("retries", retries, 0),
            ("backoff_seconds", backoff_seconds, 0),
        ):
            if value < least:
                raise ValueError(f"HFStream needs {setting} of at least {least}, not {value}")
        if on_bad_row not in ("fail", "skip"):
            raise ValueError(f"HFStream's on_bad_row is 'fail' or 'skip', not {on_bad_row!r}")
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self._tokenizer = load_tokenizer(tokenizer, bos_token, eos_token)
        self._dataset = dataset if isinstance(dataset, str) else list(dataset)
        self._seed = seed if shuffle_documents else None
        self._block_size = shuffle_documents or DOCUMENTS_AT_A_TIME
        self._repeat = repeat
        self._field = TextField(text_column)
        self._skips = on_bad_row == "skip"
        self._patience = Patience(float(stall_seconds), retries, float(backoff_seconds))
        identity = self._tokenizer.identity
        # Positions are valid only for these settings.
        self._settings = {
            "dataset": self._dataset,
            "name": name,
            "split": split,
            "text_column": text_column,
            "tokenizer": identity.sha256 or identity.name,
            "bos_id": self._tokenizer.bos_id,
            "eos_id": self._tokenizer.eos_id,
            "shuffle_documents": shuffle_documents,
            "seed": self._seed,
        }
        self._asked_streams = streams
        self._streams = self._checked_streams(jax.process_count() if streams is None else streams)
        self._name, self._stored = name, records is None
        if records is None:
            records = partial(hf_records.open_records, self._dataset, name, split)
            records(0, self._streams)  # to report a misspelt name early
        self._open_records = records
        self._first_step = 0
        self._first_positions: dict[int, Position] = {}  # of each stream; absent for its beginning
        self._opened: dict[int, TokenStream] = {}
        weakref.finalize(self, _close, self._opened)

    @property
    def max_token_id(self) -> int:
        """The largest id that the tokenizer can produce."""
        return self._tokenizer.vocab_size - 1

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        """The tokenizer that makes the ids."""
        return self._tokenizer.identity

    def contents(self) -> dict[str, str]:
        """See `lmlib.data.batch.Stored`; unknown for the constructor's `records`."""
        return hf_records.contents(self._dataset, self._name) if self._stored else {}

    def text_codec(self) -> TextCodec:
        """See `lmlib.data.text.HasText`."""
        tokenizer = self._tokenizer
        if tokenizer.tokenizer_json is None:
            return codec_of_bytes(tokenizer.bos_id)
        return codec_of_json(tokenizer.tokenizer_json, tokenizer.identity.name, tokenizer.bos_id)

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Returns the given rows of the batch of `step`; see `Source.batch`.

        Raises ValueError for a step out of order, a bad record or a stream without usable ones,
        `StreamFailure` for a stream that failed after all retries.
        """
        stream_B, row_B = np.divmod(np.arange(self.batch_size)[rows], self._rows_per_stream)
        touched, place_B = np.unique(stream_B, return_inverse=True)
        parts = [self._stream_batch(int(stream), step) for stream in touched]
        index_B = place_B * self._rows_per_stream + row_B
        return jax.tree.map(lambda *values: np.concatenate(values)[index_B], *parts)

    def state(self, step: int) -> dict[str, Any]:
        """See `Resumable.state`."""
        ahead = [opened.step for opened in self._opened.values() if opened.step != step - 1]
        if ahead:
            raise ValueError(
                f"the state at step {step} is known only after the batch of step {step - 1}, "
                f"not that of {ahead[0]}"
            )
        positions = self._first_positions | {
            stream: opened.position for stream, opened in self._opened.items()
        }
        return {
            "step": step,
            "streams": self._streams,
            "settings": self._settings,
            "positions": {str(stream): asdict(each) for stream, each in positions.items()},
        }

    def restore(self, step: int, states: list[dict[str, Any]]) -> None:
        """See `Resumable.restore`.

        Batch size and sequence length may have changed. Raises ValueError for states of other
        settings.
        """
        try:
            self._check_states(step, states)
            streams = self._checked_streams(states[0]["streams"])
            positions = {
                int(stream): Position(**position)
                for state in states
                for stream, position in state["positions"].items()
            }
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"this is not the state of a stream: {error!r:.200}") from error
        self.close()
        self._streams, self._first_step, self._first_positions = streams, step, positions

    def _check_states(self, step: int, states: list[dict[str, Any]]) -> None:
        for state in states:
            if state["step"] != step:
                raise ValueError(f"the stream's state is from step {state['step']}, not {step}")
            for setting, value in self._settings.items():
                if state["settings"][setting] != value:
                    raise ValueError(
                        f"the stream was saved with {setting} = {state['settings'][setting]!r}, "
                        f"not {value!r}: restore the old setting to resume at step {step}"
                    )
            if self._asked_streams not in (None, state["streams"]):
                raise ValueError(
                    f"the run was begun with {state['streams']} streams: set streams to that or "
                    f"None, not {self._asked_streams}"
                )

    def begin_like(self, states: list[dict[str, Any]]) -> None:
        """Makes step 0 the next batch, as in the run that had these `states` at any step.

        It uses the same number of streams; raises ValueError as `restore` does.
        """
        known = [state if isinstance(state, dict) else {} for state in states]
        self.restore(0, [{**state, "step": 0, "positions": {}} for state in known])

    def close(self) -> None:
        """Ends the threads; afterwards only the first batch can be requested."""
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    @property
    def _rows_per_stream(self) -> int:
        return self.batch_size // self._streams

    def _checked_streams(self, streams: int) -> int:
        if type(streams) is not int or streams < 1 or self.batch_size % streams:
            raise ValueError(
                f"a batch_size of {self.batch_size} is not divisible into {streams!r:.40} streams "
                "of as many rows each: change it, or set streams to a number that divides it"
            )
        return streams

    def _stream_batch(self, stream: int, step: int) -> Batch:
        """Returns all rows of `stream` in the batch of `step`."""
        opened = self._opened.get(stream)
        if opened is not None and opened.batch is not None and opened.step == step:
            return opened.batch
        if step == self._first_step:
            if opened is not None:
                opened.close()
            opened = self._opened[stream] = self._open(stream)
        if opened is None or step != opened.step + 1:
            following = self._first_step if opened is None else opened.step + 1
            raise ValueError(
                f"a stream gives its batches in order: the next step is {following}, or "
                f"{self._first_step} to begin again, not {step}"
            )
        opened.batch = opened.rows(self._rows_per_stream, self.sequence_length)
        opened.step = step
        return opened.batch

    def _open(self, stream: int) -> TokenStream:
        part = f", stream {stream} of {self._streams}" if self._streams > 1 else ""
        what = f"{self._dataset!r}{part}"
        records = partial(self._open_records, stream, self._streams)
        documents = Documents(
            SteadyRecords(records, self._patience, what),
            self._block_size,
            self._seed,
            self._repeat,
            self._field,
            self._tokenizer,
            SkippedRows() if self._skips else None,
            what,
        )
        position = self._first_positions.get(stream, BEGINNING)
        return TokenStream(documents, position, self._first_step)


def _close(opened: dict[int, TokenStream]) -> None:
    """Called when a source is no longer used, at the latest when Python exits.

    A thread inside Arrow would then abort the process, so threads are waited for, unless they hang.
    Arrow's own threads cannot be joined; they get a moment to release their buffers.
    """
    for each in opened.values():
        each.close(LAST_READ_SECONDS)
    if opened:
        time.sleep(ARROW_SECONDS)
