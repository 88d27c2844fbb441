"""From the merges of a byte-level BPE to the table of tokens that tiktoken's engine wants.

Both engines merge, again and again, the leftmost of the adjacent pairs of lowest rank. For
`tokenizers` a pair has a rank if it is in the list of merges; for tiktoken if its concatenation
is in the table of tokens, whose rank it then has.

Merges inside a stretch of text go on as in only that stretch, as long as none crosses its ends.
So wherever two adjacent pieces make up a token w, they are the two pieces that w itself comes
down to when it is encoded: at most one pair per token is ever there to merge. By induction
over the length of tokens, both engines do the same on every string if, for each token w:

- `tokenizers` encodes w by itself to [w]: then that pair is one of the merges of w. The table is
  ordered by these; where w has several, they must be contiguous, since which of them it is does
  not matter then. Llama 3's tokenizer.json is so: it lists all splits of a token.
- Or it encodes w to three pieces or more: then w is never merged by either engine. It is
  left out of the table, or, with `ignore_merges`, stays there, because then both engines emit it
  where it is a whole pre-token.
- Or it encodes w to two pieces that do not merge: tiktoken would merge them if w were in the
  table, so it is left out, and with `ignore_merges` the tokenizer is unsuitable.
"""

import json
from typing import Any

import tokenizers

from data_tools.encoders.encoder import UnsuitableError
from lmlib.data.text import tokenizers_errors


def merge_table(model: dict[str, Any]) -> tuple[list[bytes], list[int]]:
    """Tokens in the order of tiktoken's ranks, and the id of each.

    `model` is a tokenizer.json's, a BPE with its merges as lists of two.
    Raises UnsuitableError if no table gives the ids of `tokenizers`.
    """
    vocabulary: dict[str, int] = model["vocab"]
    if len(set(vocabulary.values())) != len(vocabulary):
        raise UnsuitableError("several tokens share an id")
    to_byte = _byte_of_character()
    missing = to_byte.keys() - vocabulary.keys()
    if missing:
        raise UnsuitableError(f"{len(missing)} of the 256 bytes are no tokens")

    rank: dict[str, int] = {}
    previous = None
    for position, (left, right) in enumerate(model["merges"]):
        token = left + right
        if token != previous and token in rank:
            raise UnsuitableError(f"the merges of {token!r} are not contiguous")
        rank.setdefault(token, position)
        previous = token

    # Only tokens made of the characters that stand for bytes can ever come out of a text.
    tokens = [token for token in vocabulary if len(token) > 1 and to_byte.keys() >= set(token)]
    merged, whole = [], []
    for token, piece_count in zip(tokens, _piece_counts(model, tokens), strict=True):
        if piece_count == 1:
            merged.append(token)
        elif model["ignore_merges"]:
            if piece_count == 2:
                raise UnsuitableError(f"{token!r} is in the vocabulary, but no merge leads to it")
            whole.append(token)
    order = [*to_byte, *sorted(merged, key=rank.__getitem__), *whole]
    as_bytes = [bytes(map(to_byte.__getitem__, token)) for token in order]
    return as_bytes, [vocabulary[token] for token in order]


def _piece_counts(model: dict[str, Any], tokens: list[str]) -> list[int]:
    """The number of pieces that the merges leave of each token."""
    description = {"model": {**model, "ignore_merges": False}, "added_tokens": []}
    with tokenizers_errors("the merges of this tokenizer.json make no sense"):
        merging = tokenizers.Tokenizer.from_str(json.dumps(description))
        return [len(encoding.ids) for encoding in merging.encode_batch_fast(tokens)]


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Source: `bytes_to_unicode` of GPT-2's encoder: printable characters of Latin-1 stand for
    themselves, the other bytes take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table
