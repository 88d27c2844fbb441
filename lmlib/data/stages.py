"""Consecutive sources: batches of other sizes, or of other rows, from some step on.

Shape suffixes: B batch (rows).
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from lmlib.data.batch import Batch, Source, has_whole_rows, holds_pairs, is_labelled, teacher_k
from lmlib.data.resumable import Resumable
from lmlib.data.stored.metadata import tokenizers_differ
from lmlib.data.text import HasText, TextCodec


class Stages:
    """A source for each stage of a run.

    A stage starts its source where the previous stage ends, counted in tokens of rows, padding
    included: after n rows of S tokens, with row number ⌈n·S / sequence_length⌉ of its source. If
    batches grow and rows keep their length, the rows continue as if there were no stages. A further
    stage never changes the batches before it. `batch_size` and the like are the first stage's; `at`
    has the others'.
    """

    def __init__(self, sources: Sequence[tuple[int, Source]]) -> None:
        """`sources` come with the step, counted from 0, of their first batch.

        Raises ValueError if the steps do not begin at 0 and increase, if the tokenizers or the
        teachers differ, or if a source is `Resumable`.
        """
        check_begins([begin for begin, _ in sources])
        if len(sources) > 1:
            check_alike({f"the stage from step {begin:,} on": each for begin, each in sources})
        self._sources: list[Source] = [sources[0][1]]
        self._begins = [begin for begin, _ in sources]
        first_row = 0
        for (begin, source), (end, following) in itertools.pairwise(sources):
            rows = first_row + (end - begin) * source.batch_size
            first_row = -(-rows * source.sequence_length // following.sequence_length)
            self._sources.append(Continued(following, end, first_row))
        first = self._sources[0]
        self.batch_size, self.sequence_length = first.batch_size, first.sequence_length
        self.tokenizer, self.bytes_per_target = first.tokenizer, first.bytes_per_target
        self.max_token_id = max(source.max_token_id for source in self._sources)
        self.batches = self._sources[-1].batches  # None for infinite

    def spans(self, steps: int) -> dict[range, Source]:
        """Returns the source of each stage by its steps, counted from 0, in a run of `steps`."""
        if self._begins[-1] >= steps:
            raise ValueError(
                f"a stage begins at step {self._begins[-1]:,}, and the run ends after "
                f"{steps:,} steps"
            )
        ends = [*self._begins[1:], steps]
        return dict(zip(map(range, self._begins, ends), self._sources, strict=True))

    def at(self, step: int) -> Source:
        """See `Staged`. Raises ValueError for a negative step."""
        if step < 0:
            raise ValueError(f"a batch's step must be at least 0, not {step}")
        return self._sources[bisect_right(self._begins, step) - 1]

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Returns the given rows of the batch of `step`; see `Source.batch`."""
        return self.at(step).batch(step, rows)

    def text_codec(self) -> TextCodec | None:
        """See `HasText`: the first stage's."""
        first = self._sources[0]
        return first.text_codec() if isinstance(first, HasText) else None


class Continued:
    """A source that continues another one: step `begin` starts with the other's row `first_row`.

    Rows are numbered over all batches; a batch may have rows of two of the source's.
    """

    def __init__(self, source: Source, begin: int, first_row: int) -> None:
        self.source = source
        self.batch_size = source.batch_size
        self.sequence_length = source.sequence_length
        self.max_token_id = source.max_token_id
        self.tokenizer = source.tokenizer
        self.bytes_per_target = source.bytes_per_target
        self.teacher_k = teacher_k(source)
        self.pairs, self.labelled = holds_pairs(source), is_labelled(source)
        self.whole_rows = has_whole_rows(source)
        self._begin, self._first_row = begin, first_row
        self.batches: int | None = None  # without end
        if source.batches is not None:
            left = source.batches * source.batch_size - first_row
            self.batches = begin + max(0, left // source.batch_size)

    def text_codec(self) -> TextCodec | None:
        """See `HasText`."""
        return self.source.text_codec() if isinstance(self.source, HasText) else None

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Returns the given rows of the batch of `step`; see `Source.batch`."""
        parts = [self.source.batch(*part) for part in self.parts(step, rows)]
        return jax.tree.map(lambda *each: np.concatenate(each), *parts)

    def parts(self, step: int, rows: slice = slice(None)) -> Iterator[tuple[int, slice]]:
        """Yields the source's own steps and rows that make up the given rows of `step`.

        Raises ValueError for a step before `begin`.
        """
        if step < self._begin:
            raise ValueError(f"this source begins at step {self._begin}, not at {step}")
        size = self.batch_size
        row_B = np.arange(size)[rows]
        number_B = self._first_row + (step - self._begin) * size + row_B
        own_step_B, own_row_B = np.divmod(number_B, size)
        if not len(row_B):
            yield 0, slice(0, 0)
        for own_step in np.unique(own_step_B).tolist():
            here_B = own_row_B[own_step_B == own_step]
            yield own_step, slice(int(here_B[0]), int(here_B[-1]) + 1, rows.step)


def check_begins(begins: Sequence[int]) -> None:
    """Raises ValueError unless the stages' steps begin at 0 and increase."""
    if not begins:
        raise ValueError("there must be at least one stage")
    if begins[0] != 0:
        raise ValueError(f"the first stage begins at step 0, not {begins[0]:,}")
    for begin, following in itertools.pairwise(begins):
        if following <= begin:
            raise ValueError(
                f"a stage that begins at step {following:,} comes after one that begins at step "
                f"{begin:,}: put stages in order, each with a step of its own"
            )


def check_alike(sources: Mapping[str, Source], *settings: str) -> None:
    """Raises ValueError if one of `sources` is `Resumable`, or if two of them differ.

    Compares tokenizers, stored teachers and `settings`. Messages use the sources' keys.
    """
    for name, source in sources.items():
        if isinstance(source, Resumable):
            raise ValueError(
                f"{name} is a {type(source).__name__}, whose batches depend on those before; here "
                "batches must be a function of the step: pretokenize it"
            )
    for (name, source), (other_name, other) in itertools.combinations(sources.items(), 2):
        values = {each: (getattr(source, each), getattr(other, each)) for each in settings}
        values["teacher_k"] = teacher_k(source), teacher_k(other)
        for setting, (value, other_value) in values.items():
            if value != other_value:
                raise ValueError(
                    f"{name} has {setting} {value}, but {other_name} has {other_value}: give all "
                    "the same"
                )
        if tokenizers_differ(source.tokenizer, other.tokenizer):
            raise ValueError(
                f"{name} was made by {source.tokenizer}, but {other_name} by {other.tokenizer}: "
                "pretokenize both with one tokenizer"
            )
