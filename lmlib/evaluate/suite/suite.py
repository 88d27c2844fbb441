"""The suite's settings in an experiment, its pieces, and its evaluation of models.

Three measurements are on random tokens. Copying: a random sequence occurs twice, so all but the
copy's first token are known. Induction: A B … A → B (Olsson et al. 2022, arXiv:2209.11895), a
single cue at a single distance. Recall: a fact of random tokens in a long context, asked for at its
end (the needle test, Kamradt 2023).
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.data.permutation import hash_words, permute
from lmlib.data.text import TextCodec
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.windows import Packing, Window, windows
from lmlib.models.model import Model

# Texts written for this suite. Results are compared over time, so a changed text is a new
# measurement and needs a new name.
TEXTS = {
    kind: (Path(__file__).parent / "texts" / f"{kind}.txt").read_text(encoding="utf-8")
    for kind in ("prose", "code", "numbers", "languages", "markup")
}
_BATCH_TOKENS = 4096
_LEAST_FOR_SLOPE = 64  # tokens
_SHORT = "ends of texts"
COPIED = (8, 32, 128)  # tokens of a copied sequence
_COPIED_TARGETS, _LEAST_COPIES = 256, 4  # for each length
DISTANCES = (4, 16, 64, 256)  # of induction, in tokens
_BEFORE, _INDUCTIONS = 2, 32  # tokens before the first A; pieces for each distance
DEPTHS = (10, 50, 90)  # percent of the context before the fact
_CUE, _ANSWER = 4, 8  # tokens of a fact: the part repeated at the end, and the part that counts
_RECALLS, _SHORTEST = 4, 64  # pieces for each depth; tokens


class Piece(NamedTuple):
    """A document of a measurement such as "copying/8"; its targets count from input `first` on."""

    measure: str
    ids: Sequence[int]
    first: int


class RandomIds:
    """Sequences of distinct `ids` that depend only on a seed; ids repeat if there are too few."""

    def __init__(self, ids: Sequence[int], seed: int):
        self._ids, self._seed = np.asarray(ids), seed

    def __call__(self, count: int, *key: int) -> list[int]:
        """Returns the sequence of `count` ids for `key`."""
        size = len(self._ids)
        first = np.arange(min(count, size))
        order = permute(first, size, seed=self._seed, epoch=int(hash_words(*key)[0]))
        return self._ids[np.resize(order, count)].tolist()


def sizes(longest: int, begin: int) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of each measurement for `longest` tokens after `begin` first ones."""
    return {
        "copying": tuple(n for n in COPIED if begin + 2 * n - 1 <= longest),
        "induction": tuple(d for d in DISTANCES if begin + _BEFORE + d + 1 <= longest),
        "recall": DEPTHS if longest >= _SHORTEST else (),
    }


def pieces(
    random_ids: RandomIds, begin: Sequence[int], filler: Sequence[int], longest: int
) -> Iterator[Piece]:
    """Yields the pieces of all three measurements, each starting with `begin`.

    `filler` has ids of a text around facts (random ids if empty). Measurements whose contexts would
    exceed `longest` tokens are left out.
    """
    of = sizes(longest, len(begin))
    for length in of["copying"]:
        for number in range(max(_LEAST_COPIES, _COPIED_TARGETS // length)):
            once = random_ids(length, 0, length, number)
            yield Piece(f"copying/{length}", [*begin, *once, *once], len(begin) + length)
    for distance in of["induction"]:
        for number in range(_INDUCTIONS):
            drawn = random_ids(_BEFORE + distance, 1, distance, number)
            ids = [*begin, *drawn, *drawn[_BEFORE : _BEFORE + 2]]
            yield Piece(f"induction/{distance}", ids, len(ids) - 2)
    for depth in of["recall"]:
        for number in range(_RECALLS):
            fact = random_ids(_CUE + _ANSWER, 2, depth, number)
            room = longest + 1 - len(begin) - 2 * len(fact)
            around = filler or random_ids(room, 3, depth, number)
            text = np.resize(np.roll(around, number * len(around) // _RECALLS), room).tolist()
            before = room * depth // 100
            ids = [*begin, *text[:before], *fact, *text[before:], *fact]
            yield Piece(f"recall/{depth}", ids, len(ids) - 1 - _ANSWER)


@dataclasses.dataclass(frozen=True)
class Suite:
    """Bits per byte of several texts, copying, induction, recall and in-context learning.

    Args:
      seed: determines the random tokens.
      longest: tokens of a sequence; shorter if the model was trained on shorter ones.
    """

    seed: int = 0
    longest: int = 512

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"longest must be at least 1, got {self.longest}")

    def length(self, trained: int | None) -> int:
        """Returns the length of sequences, for a model trained on `trained` tokens per sequence."""
        return min(self.longest, trained or self.longest)

    def metrics(self, length: int, codec: TextCodec | None) -> tuple[str, ...]:
        """Returns the names of the metrics, for sequences of `length` tokens."""
        texts = [f"suite/bits_per_byte/{kind}" for kind in TEXTS] if codec else []
        slope = ["suite/in_context_slope"] if codec and length >= _LEAST_FOR_SLOPE else []
        others = [
            f"suite/{name}_{number}{by}"
            for name, each in sizes(length, len(_begin(codec))).items()
            if each
            for number in ("accuracy", "loss")
            for by in ("", *(f"/{size}" for size in each))
        ]
        return (*texts, *slope, *others)

    def evaluator(
        self, mesh: Mesh, compute: Compute, vocab: int, codec: TextCodec | None, length: int
    ) -> "SuiteEvaluator":
        """Returns the evaluator of models on `mesh`; see `SuiteEvaluator`."""
        return SuiteEvaluator(self, Scorer(mesh, compute), vocab, codec, length)


class SuiteEvaluator:
    """Scores models with the same vocabulary; measurements that need texts need a codec.

    Raises ValueError if the codec has no id below `vocab`, or cannot encode the suite's texts.
    """

    def __init__(
        self, suite: Suite, scorer: Scorer, vocab: int, codec: TextCodec | None, length: int
    ):
        self._scorer, self._length = scorer, length
        ids = [id for id in range(vocab) if codec is None or codec.decode([id])]
        if not ids:
            raise ValueError(f"the tokenizer has no text of any id below {vocab}")
        prose = codec.encode(TEXTS["prose"]) if codec else ()
        self._pieces = [
            *pieces(RandomIds(ids, suite.seed), _begin(codec), prose, length),
            *(_of_texts(codec, length) if codec else ()),
        ]
        rows = scorer.divisor * max(1, _BATCH_TOKENS // (length * scorer.divisor))
        order = sorted(enumerate(self._pieces), key=lambda each: -len(each[1].ids))
        cut = (Window(i, np.array(piece.ids), piece.first) for i, piece in order)
        self._batches = list(Packing(rows, length).batches(cut))

    @property
    def tokens(self) -> int:
        """The number of computed positions."""
        return sum(batch.tokens.size for batch, _ in self._batches)

    def __call__(self, model: Model) -> dict[str, float]:
        """Returns `Suite.metrics`, each a mean over its targets. Every process must call it.

        Accuracy and loss (in nats) of copying, induction and recall are also averaged over their
        sizes.
        """
        scored: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for batch, placed in self._batches:
            nats_BS, likeliest_BS = self._scorer(model, batch)
            for window, row, start in placed:
                counted = row, slice(start + window.first, start + window.inputs)
                nats = nats_BS[counted].astype(np.float64)
                scored[window.document] = nats, likeliest_BS[counted]
        nats_of: dict[str, list[np.ndarray]] = defaultdict(list)
        hits_of: dict[str, list[np.ndarray]] = defaultdict(list)
        for i, piece in enumerate(self._pieces):
            nats_of[piece.measure].append(scored[i][0])
            hits_of[piece.measure].append(scored[i][1])
        found = {}
        for kind, text in TEXTS.items():
            if of_kind := nats_of.get(f"text/{kind}"):
                bits = sum(each.sum() for each in of_kind) / math.log(2)
                found[f"suite/bits_per_byte/{kind}"] = float(bits / len(text.encode()))
        if short := nats_of.get(_SHORT):
            texts = (each for kind in TEXTS for each in nats_of[f"text/{kind}"])
            whole = [each for each in texts if len(each) == self._length]
            found["suite/in_context_slope"] = in_context_slope(np.stack(whole), np.stack(short))
        for name in ("copying", "induction", "recall"):
            of_name = [measure for measure in nats_of if measure.startswith(f"{name}/")]
            for number, values in (("accuracy", hits_of), ("loss", nats_of)):
                means = {size: float(np.concatenate(values[size]).mean()) for size in of_name}
                if means:
                    found[f"suite/{name}_{number}"] = sum(means.values()) / len(means)
                for size, mean in means.items():
                    found[f"suite/{name}_{number}/{size.partition('/')[2]}"] = mean
        return found


def in_context_slope(whole_NS: np.ndarray, short_NT: np.ndarray) -> float:
    """Returns the effect of more context on the loss, in nats per token; lower is better.

    It is the mean loss of T tokens at the end of sequences of S tokens, minus the mean loss of the
    same tokens at the end of 2 T tokens.
    """
    return float(whole_NS[:, -short_NT.shape[1] :].mean() - short_NT.mean())


def _begin(codec: TextCodec | None) -> Sequence[int]:
    """Returns the ids that begin a document."""
    return codec.encode("") if codec else ()


def _of_texts(codec: TextCodec, length: int) -> Iterator[Piece]:
    """Yields each text in windows, and the end of each full window with little context.

    The end is the last eighth of the window. Half of it counts, with a context of a sixteenth to an
    eighth of `length`.
    """
    eighth = length // 8
    for kind, text in TEXTS.items():
        for window in windows(0, np.array(codec.encode(text)), length):
            yield Piece(f"text/{kind}", window.ids.tolist(), window.first)
            if window.inputs == length >= _LEAST_FOR_SLOPE:
                yield Piece(_SHORT, window.ids[-eighth - 1 :].tolist(), eighth - length // 16)
