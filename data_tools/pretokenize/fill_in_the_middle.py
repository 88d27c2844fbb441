"""Documents whose middle comes last, so that models learn to fill it in (arXiv:2207.14255)."""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from data_tools.held_out import hash_of
from data_tools.tokenizer import Tokenizer

# Names of the tokens before the beginning, the middle and the end: of Qwen 2.5 Coder, of StarCoder,
# of DeepSeek Coder.
TOKENS = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),
)


class FillInTheMiddle(Tokenizer):
    """Encodes a share of the documents in another order of their parts.

    A document is cut at two of its characters, each place as probable as any other. Its tokens
    become prefix, beginning, suffix, end, middle, middle (PSM), or prefix, suffix, end, middle,
    beginning, middle (SPM). A hash of the text makes all choices, so they don't depend on the order
    of the documents.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rate: float,
        spm_rate: float = 0.5,
        tokens: Sequence[str] | None = None,
    ) -> None:
        """`rate` is the share of documents to cut, `spm_rate` the share of these in the order SPM.

        `tokens` names the tokens prefix, middle and suffix, by default one of `TOKENS`. Raises
        ValueError for rates outside of [0, 1], or if the tokenizer has no such tokens.
        """
        for name, value in (("fim_rate", rate), ("fim_spm_rate", spm_rate)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], not {value}")
        self.identity, self.tokenizer_json = tokenizer.identity, tokenizer.tokenizer_json
        self.vocab_size = tokenizer.vocab_size
        self.bos_id, self.eos_id = tokenizer.bos_id, tokenizer.eos_id
        self._tokenizer, self._rate, self._spm_rate = tokenizer, rate, spm_rate
        names, ids = _special_tokens(tokenizer, tokens)
        self._prefix, self._middle, self._suffix = (np.array([i], np.uint32) for i in ids)
        self.settings = {
            **tokenizer.settings,
            "fim_rate": rate,
            "fim_spm_rate": spm_rate,
            "fim_tokens": list(names),
        }

    def size(self, text: str) -> int:
        """See `Tokenizer.size`."""
        return self._tokenizer.size(text)

    def encode_batch(self, documents: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer.encode_batch`."""
        cuts = [self._cut(text) for text in documents]
        pieces: list[str] = []
        for text, cut in zip(documents, cuts, strict=True):
            ends = (0, len(text)) if cut is None else (0, *cut[:2], len(text))
            pieces += [text[begin:end] for begin, end in pairwise(ends)]
        encoded = iter(self._tokenizer.encode_batch(pieces))
        return [self._joined(cut, encoded) for cut in cuts]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return self._tokenizer.decode(ids)

    def _cut(self, text: str) -> tuple[int, int, bool] | None:
        """Returns where the middle begins and ends, and True for the order SPM; None: no cut."""
        choices = random.Random(hash_of(text))
        if choices.random() >= self._rate:
            return None
        begin, end = sorted(choices.randint(0, len(text)) for _ in range(2))
        return begin, end, choices.random() < self._spm_rate

    def _joined(
        self, cut: tuple[int, int, bool] | None, encoded: Iterator[np.ndarray]
    ) -> np.ndarray:
        if cut is None:
            return next(encoded)
        begin, middle, end = (next(encoded) for _ in range(3))
        if cut[2]:
            parts = (self._prefix, self._suffix, end, self._middle, begin, middle)
        else:
            parts = (self._prefix, begin, self._suffix, end, self._middle, middle)
        return np.concatenate(parts)


def _special_tokens(
    tokenizer: Tokenizer, names: Sequence[str] | None
) -> tuple[Sequence[str], list[int]]:
    """Returns the names and ids of the tokens prefix, middle and suffix."""
    known = TOKENS if names is None else (tuple(names),)
    for each in known:
        ids = [id for id in map(tokenizer.id_of, each) if id is not None]
        if len(ids) == len(each) == 3:
            return each, ids
    raise ValueError(
        f"{tokenizer.identity.name} has no three tokens {', '.join(known[0])}: name others with "
        "--fim_tokens=prefix,middle,suffix, or train a tokenizer with --special_tokens"
    )
