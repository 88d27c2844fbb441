"""The suite's settings in an experiment, and its evaluation of models."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.data.text import TextCodec
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.suite.random_sequences import Piece, RandomIds, pieces, sizes
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
