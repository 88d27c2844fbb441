"""Sources mixed in exact proportions, which may change during training.

The source of each sequence follows from its number by arithmetic, so a mixture resumes, and splits
over processes, as its sources do.

Shape suffixes: B batch (rows), P places of the pattern, N sources of a stage.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import jax
import numpy as np

from lmlib.data.batch import Batch, Source, has_whole_rows, is_labelled, teacher_k
from lmlib.data.stages import check_alike, check_begins
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.text import HasText, TextCodec

PERIOD = 1024  # sequences after which a stage's pattern repeats


@dataclass(frozen=True)
class Stage:
    """The weights of some of a mixture's sources, by name, from the step `begin` on.

    Weights are positive and only their ratios matter. A source without a weight pauses.

    Raises ValueError for a negative step, no weights, a weight that is not positive and finite, or
    one too small for a single sequence in 1,024.
    """

    weights: Mapping[str, float | int]
    begin: int = 0

    def __post_init__(self) -> None:
        if self.begin < 0:
            raise ValueError(f"a stage must begin at step 0 or later, not {self.begin}")
        title, total = f"the stage that begins at step {self.begin}", sum(self.weights.values())
        if not self.weights:
            raise ValueError(f"{title} has no weights: give one to at least one source")
        for name, weight in self.weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(
                    f"{title} gives {name!r} the weight {weight}: weights are positive; "
                    "leave out a source that is not wanted"
                )
        for name, weight in self.weights.items():
            if self.counts[name] == 0:
                raise ValueError(
                    f"{title} gives {name!r} the weight {weight} of {total}, less than one "
                    f"sequence in {PERIOD:,}: give it at least "
                    f"{(total - weight) / (PERIOD - 1):.4g}, or leave it out"
                )

    @property
    def counts(self) -> dict[str, int]:
        """Sequences of each source among any 1,024 consecutive ones, in the order of names."""
        names = sorted(self.weights)
        return dict(zip(names, apportion([self.weights[name] for name in names]), strict=True))


class Mixture:
    """Sequences from several sources, in proportions set stage by stage.

    Sequence p = t·batch_size + r of the mixture is row r of step t. Any 1,024 consecutive sequences
    of a stage hold exactly `Stage.counts`, and any run of them holds within two sequences of its
    share (see `interleave`). Each source is seen in its own order: the k-th sequence taken from it
    is row k % batch_size of its step k // batch_size, and a later stage continues where an earlier
    one stopped. A further stage never changes the batches before it. Names break ties.
    `begins` has the first step of each stage.
    """

    def __init__(self, sources: Mapping[str, Source], stages: Sequence[Stage]) -> None:
        """Mixes `sources`, by name, according to `stages`.

        Raises ValueError if sources differ in batch_size, sequence_length or tokenizer, are finite
        or `Resumable`; if the stages' steps do not begin at 0 and increase; if a stage names an
        unknown source, or a source is in no stage.
        """
        _check(sources, stages)
        first = next(iter(sources.values()))
        self.batch_size = first.batch_size
        self.sequence_length = first.sequence_length
        self.teacher_k, self.labelled = teacher_k(first), is_labelled(first)
        self.whole_rows = all(map(has_whole_rows, sources.values()))
        self.max_token_id = max(source.max_token_id for source in sources.values())
        self.batches = None
        # Sources don't count targets per sequence, so the mean of bytes per target is unknown.
        self.bytes_per_target = None
        self.sources = dict(sources)
        known = [source.tokenizer for source in sources.values() if source.tokenizer]
        with_digest = (each for each in known if each.sha256)
        self.tokenizer: TokenizerIdentity | None = next(with_digest, known[0] if known else None)
        self.begins = [stage.begin for stage in stages]
        self._orders: list[_Order] = []
        for stage in stages:
            self._orders.append(_Order(stage, self.sequences_before(stage.begin)))

    def text_codec(self) -> TextCodec | None:
        """See `HasText`: the codec of the first source by name that has one."""
        ordered = [self.sources[name] for name in sorted(self.sources)]
        codecs = (source.text_codec() for source in ordered if isinstance(source, HasText))
        return next((codec for codec in codecs if codec is not None), None)

    def sequences_before(self, step: int) -> dict[str, int]:
        """Returns the number of sequences that steps 0 … `step` - 1 take from each source."""
        taken = dict.fromkeys(self.sources, 0)
        ends = [*self.begins[1:], step]
        for begin, end, order in zip(self.begins, ends, self._orders, strict=False):
            if begin < step:
                number_B = np.array([(min(step, end) - begin) * self.batch_size])
                taken |= dict(zip(order.names, order.taken(number_B)[0].tolist(), strict=True))
        return taken

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Returns the given rows of the batch of `step`; reads no other row of any source."""
        names, source_B, sequence_B = self._locate(step, rows)
        if len(source_B) == 0:
            return self.sources[names[0]].batch(0, slice(0, 0))
        source_step_B, source_row_B = np.divmod(sequence_B, self.batch_size)

        # Neighbouring rows of a source are read together. Rows of one source are at most batch_size
        # sequences apart, so two neighbours always belong to the same step.
        sorted_B = np.lexsort((sequence_B, source_B))
        same_source = np.diff(source_B[sorted_B]) == 0
        neighbours = same_source & (np.diff(source_row_B[sorted_B]) == 1)
        parts = []
        for run in np.split(sorted_B, 1 + np.flatnonzero(~neighbours)):
            first_row = int(source_row_B[run[0]])
            run_rows = slice(first_row, first_row + len(run))
            source = self.sources[names[source_B[run[0]]]]
            parts.append(source.batch(int(source_step_B[run[0]]), run_rows))
        unsorted_B = np.argsort(sorted_B)
        return jax.tree.map(lambda *values: np.concatenate(values)[unsorted_B], *parts)

    def origins(self, step: int) -> tuple[list[str], list[int]]:
        """Returns the source of each row of the batch of `step`, and the sequence's number in it.

        Raises ValueError for a negative step.
        """
        names, source_B, sequence_B = self._locate(step, slice(None))
        return [names[source] for source in source_B.tolist()], sequence_B.tolist()

    def _locate(self, step: int, rows: slice) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Returns the stage's source names and, for each row, the source's index and the number."""
        if step < 0:
            raise ValueError(f"a batch's step must be at least 0, not {step}")
        stage = bisect_right(self.begins, step) - 1
        order = self._orders[stage]
        row_B = np.arange(self.batch_size)[rows]
        number_B = (step - self.begins[stage]) * self.batch_size + row_B
        source_B = order.source_P[number_B % PERIOD]
        return order.names, source_B, order.taken(number_B)[np.arange(len(number_B)), source_B]


class _Order:
    """The source of each sequence of a stage; sequences are numbered from the stage's first."""

    def __init__(self, stage: Stage, taken: Mapping[str, int]) -> None:
        """`taken` has the number of sequences that earlier stages took from each source."""
        self.names = list(stage.counts)
        self._counts_N = np.array(list(stage.counts.values()))
        self._taken_N = np.array([taken[name] for name in self.names])
        self.source_P = np.array(interleave(self._counts_N.tolist()))
        is_source_PN = self.source_P[:, None] == np.arange(len(self.names))
        self._taken_PN = np.cumsum(is_source_PN, axis=0) - is_source_PN  # so far in the period

    def taken(self, number_B: np.ndarray) -> np.ndarray:
        """Returns (B, N): the number of sequences taken from each source before each of `number_B`.

        Earlier stages are included.
        """
        period_B, place_B = np.divmod(number_B, PERIOD)
        return self._taken_N + period_B[:, None] * self._counts_N + self._taken_PN[place_B]


def apportion(weights: Sequence[float | int]) -> list[int]:
    """Returns 1,024 places divided in proportion to positive `weights`, by the largest remainder.

    Ties go to the earlier weight (Hamilton's method, 1792). The arithmetic is exact.
    """
    exact = [Fraction(weight) for weight in weights]
    quotas = [PERIOD * weight / sum(exact) for weight in exact]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda each: counts[each] - quotas[each])
    for each in by_remainder[: PERIOD - sum(counts)]:
        counts[each] += 1
    return counts


def interleave(counts: Sequence[int]) -> list[int]:
    """Returns a sequence with each index i `counts[i]` times, spread evenly.

    The `counts` are positive and sum to 1,024. With N > 1 counts, the first k places hold each
    index within 1 - 1/(2N - 2) of k·counts[i]/1,024, the best bound that holds for all counts:
    Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980). Ties go to the
    lower index. The order is part of a run's definition: it never changes between versions.
    """
    scale = max(1, 2 * len(counts) - 2)  # the bound is 1 - 1/scale
    taken = [0] * len(counts)

    def may_come(index: int, place: int) -> bool:
        return scale * (place * counts[index] - PERIOD * taken[index]) >= PERIOD

    def must_come(index: int) -> int:
        """Returns the deadline of `index`: the first place that breaks the bound without it."""
        return PERIOD * (scale * (taken[index] + 1) - 1) // (scale * counts[index]) + 1

    pattern = []
    for place in range(1, PERIOD + 1):
        ready = [index for index in range(len(counts)) if may_come(index, place)]
        pattern.append(min(ready, key=must_come))
        taken[pattern[-1]] += 1
    return pattern


def _check(sources: Mapping[str, Source], stages: Sequence[Stage]) -> None:
    if not sources:
        raise ValueError("a Mixture needs at least one source")
    for name, source in sources.items():
        if source.batches is not None:
            raise ValueError(
                f"source {name!r} ends after {source.batches} batches; a Mixture needs sources "
                "that never end, such as FlatTokens with epochs=None"
            )
    named = {f"source {name!r}": source for name, source in sources.items()}
    check_alike(named, "batch_size", "sequence_length")
    check_begins([stage.begin for stage in stages])
    for stage in stages:
        for name in sorted(stage.weights.keys() - sources.keys()):
            raise ValueError(
                f"the stage that begins at step {stage.begin} weighs {name!r}, which is none of: "
                f"{', '.join(sorted(sources))}"
            )
    for name in sorted(sources.keys() - set().union(*(stage.weights for stage in stages))):
        raise ValueError(f"source {name!r} has a weight in no stage: give it one or leave it out")
