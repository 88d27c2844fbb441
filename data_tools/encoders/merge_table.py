"""Converts the merges of a byte-level BPE to the table of tokens for tiktoken's engine.

Both engines repeatedly merge the leftmost adjacent pair with the lowest rank. For `tokenizers` a
pair has a rank if it is in the list of merges; for tiktoken, if its concatenation is in the table
of tokens, whose rank it then has.

While no merge crosses the ends of a stretch of text, merges inside it proceed as in that stretch by
itself. Wherever two adjacent pieces form a token w, they are therefore the two pieces that remain
when w itself is encoded: at most one pair per token ever occurs. By induction over the length of
tokens, both engines agree on every string if one of these holds for each token w:

- `tokenizers` encodes w by itself to [w]: then that pair is one of the merges of w. The table is
  ordered by these. If w has several merges, they must be contiguous, since their order then does
  not matter. Llama 3's tokenizer.json is like this: it lists all splits of a token.
- It encodes w to three pieces or more: then neither engine ever merges to w. It is left out of the
  table; with `ignore_merges` it stays, because then both engines emit it for a whole pre-token.
- It encodes w to two pieces that do not merge: tiktoken would merge them if w were in the table, so
  it is left out, and with `ignore_merges` the tokenizer is unsuitable.
"""

import json
from typing import Any

import tokenizers

from data_tools.encoders.encoder import UnsuitableError
from lmlib.data.text import tokenizers_errors


def merge_table(model: dict[str, Any]) -> tuple[list[bytes], list[int]]:
    """Returns the tokens in the order of tiktoken's ranks, and the id of each.

    `model` is a BPE from a tokenizer.json, with its merges as lists of two. Raises UnsuitableError
    if no table gives the ids of `tokenizers`.
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

    # Only tokens made of the characters that stand for bytes can result from a text.
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
    """Returns the number of pieces into which the merges encode each token."""
    description = {"model": {**model, "ignore_merges": False}, "added_tokens": []}
    with tokenizers_errors("the merges of this tokenizer.json make no sense"):
        merging = tokenizers.Tokenizer.from_str(json.dumps(description))
        return [len(encoding.ids) for encoding in merging.encode_batch_fast(tokens)]


def _byte_of_character() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for.

    Source: `bytes_to_unicode` of GPT-2's encoder. Printable Latin-1 characters stand for
    themselves; the other bytes take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table
