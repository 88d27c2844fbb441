"""Loss on independent documents: per token, per byte, per character and by position."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from lmlib.evaluate.ratio import Estimate, Ratio
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.windows import Packing, Placed, Window, windows
from lmlib.models.model import Model


class Document(NamedTuple):
    """A document to evaluate.

    Attributes:
      ids: token ids, including begin and end tokens.
      bytes, characters: size of its text, in UTF-8 and in Unicode code points; `None` if unknown.
      is_target: True for ids that count; `None`: all. The first id never counts.
    """

    ids: np.ndarray
    bytes: int | None = None
    characters: int | None = None
    is_target: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class AtPositions:
    """The loss of targets with `first` + 1 to `last` + 1 tokens of context, in nats per token."""

    first: int
    last: int
    targets: int
    loss: Estimate


@dataclasses.dataclass(frozen=True)
class DocumentsEvaluation:
    """A model's loss on documents; standard errors are over documents.

    Attributes:
      targets: number of predicted tokens, each counted once.
      bytes, characters: size of the documents' texts; `None` if unknown, like the bits per byte and
        per character.
      loss: nats per target.
      perplexity: exp(loss), with a standard error by the delta method.
      by_position: loss by the number of inputs before the target in its window, in powers of two.
    """

    documents: int
    targets: int
    bytes: int | None
    characters: int | None
    loss: Estimate
    perplexity: Estimate
    bits_per_byte: Estimate | None
    bits_per_character: Estimate | None
    by_position: tuple[AtPositions, ...]


@dataclasses.dataclass
class _Open:
    """A document with windows that are not scored yet."""

    document: Document
    windows_left: int
    nats_K: np.ndarray
    targets_K: np.ndarray


class _Sums:
    """Sums over documents; K buckets of positions."""

    def __init__(self, buckets: int):
        self.documents = 0
        self.loss, self.per_byte, self.per_character = Ratio(), Ratio(), Ratio()
        self.by_bucket_K = [Ratio() for _ in range(buckets)]
        self.bytes_known = self.characters_known = True

    def add(self, scored: _Open) -> None:
        nats, document = float(scored.nats_K.sum()), scored.document
        self.documents += 1
        self.loss.add(nats, float(scored.targets_K.sum()))
        self.bytes_known &= document.bytes is not None
        self.characters_known &= document.characters is not None
        self.per_byte.add(nats, float(document.bytes or 0))
        self.per_character.add(nats, float(document.characters or 0))
        for ratio, y, x in zip(self.by_bucket_K, scored.nats_K, scored.targets_K, strict=True):
            ratio.add(float(y), float(x))


def evaluate_documents(
    model: Model,
    documents: Iterable[Document],
    scorer: Scorer,
    packing: Packing,
    overlap: int = 0,
    progress: Callable[[int, int], None] = lambda documents, targets: None,
) -> DocumentsEvaluation:
    """Evaluates each document independently; packed documents do not see each other.

    Every process must call it, with the same documents.

    Args:
      packing: how documents are put into batches; longer ones are cut as in `windows.windows`.
      overlap: tokens of context at the start of each window of a document, except the first.
      progress: called with the numbers of finished documents and targets, after each batch.

    Raises:
      ValueError: if there are no documents, none has two tokens, a token is outside the model's
        vocabulary, or `overlap` leaves no new tokens in a window.
    """
    length = packing.sequence_length
    if not 0 <= overlap < length:
        raise ValueError(f"overlap must be at least 0 and below {length}, got {overlap}")
    bucket_S = _buckets(length)
    buckets = int(bucket_S[-1]) + 1
    sums = _Sums(buckets)
    unfinished: dict[int, _Open] = {}

    def cut() -> Iterator[Window]:
        for number, document in enumerate(documents):
            if len(document.ids) and (highest := int(document.ids.max())) >= model.vocab:
                raise ValueError(
                    f"document {number:,} has token id {highest}, but the model's vocabulary ends "
                    f"at {model.vocab - 1}: it was made by another tokenizer than the model's"
                )
            pieces = list(windows(number, document.ids, length, overlap))
            nothing = np.zeros(buckets), np.zeros(buckets, np.int64)
            begun = _Open(document, len(pieces), *nothing)
            if pieces:
                unfinished[number] = begun
            else:
                sums.add(begun)
            yield from pieces

    def scored() -> Iterator[tuple[list[Placed], np.ndarray]]:
        """Prepares each batch while the devices compute the previous one."""
        begun: tuple[list[Placed], jax.Array] | None = None
        for batch, placed in packing.batches(cut()):
            before, begun = begun, (placed, scorer.begin(model, batch)[0])
            if before is not None:
                yield before[0], np.asarray(before[1])
        if begun is not None:
            yield begun[0], np.asarray(begun[1])

    for placed, nats_BS in scored():
        for window, row, start in placed:
            one = unfinished[window.document]
            counted = np.arange(window.first, window.inputs)
            if (is_target := one.document.is_target) is not None:
                counted = counted[is_target[window.offset + 1 + counted]]
            nats = nats_BS[row, start + counted].astype(np.float64)
            one.nats_K += np.bincount(bucket_S[counted], nats, buckets)
            one.targets_K += np.bincount(bucket_S[counted], minlength=buckets)
            one.windows_left -= 1
            if not one.windows_left:
                sums.add(unfinished.pop(window.document))
        progress(sums.documents, int(sums.loss.denominator))
    return _evaluation(sums)


def _evaluation(sums: _Sums) -> DocumentsEvaluation:
    if sums.documents == 0:
        raise ValueError("there are no documents")
    if sums.loss.documents == 0:
        raise ValueError(
            f"no document can be measured: none of {sums.documents:,} documents has two tokens"
        )
    loss = sums.loss.estimate()
    perplexity = float(np.exp(np.float64(loss.value)))  # may be infinite
    error = None if loss.standard_error is None else perplexity * loss.standard_error
    known_bytes = sums.bytes_known and sums.per_byte.documents > 0
    known_characters = sums.characters_known and sums.per_character.documents > 0
    bit = math.log(2)  # in nats
    return DocumentsEvaluation(
        documents=sums.documents,
        targets=int(sums.loss.denominator),
        bytes=int(sums.per_byte.denominator) if known_bytes else None,
        characters=int(sums.per_character.denominator) if known_characters else None,
        loss=loss,
        perplexity=Estimate(perplexity, error),
        bits_per_byte=sums.per_byte.estimate(bit) if known_bytes else None,
        bits_per_character=sums.per_character.estimate(bit) if known_characters else None,
        by_position=tuple(
            AtPositions(2**k if k else 0, 2 ** (k + 1) - 1, int(each.denominator), each.estimate())
            for k, each in enumerate(sums.by_bucket_K)
            if each.documents
        ),
    )


def _buckets(length: int) -> np.ndarray:
    """Returns the bucket of each position: 0–1, 2–3, 4–7, … are buckets 0, 1, 2, …"""
    exponents = np.frexp(np.maximum(np.arange(length), 1).astype(np.float64))[1]
    return exponents.astype(np.int64) - 1
