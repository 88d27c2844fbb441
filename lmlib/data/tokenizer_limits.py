"""Bounds on the text and tokens that a tokenizer.json can make of a text.

A tokenizer may be untrusted, and a few words in it can request terabytes: one part replaces each
letter by two, and a file may have forty such parts. All commands that load a tokenizer therefore
check these bounds. Useful tokenizers stay far below them.
"""

import base64
import json
import math
import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # slow to import
    from tokenizers import Tokenizer

MOST_NORMALIZED, MOST_SPLIT, MOST_DECODED = 64, 16, 64  # characters per character
MOST_STEPS = 1_000  # consecutive steps of a normalizer etc.
MOST_AROUND = 1_000  # tokens added around a text
LONGEST_TOKEN = 10_000  # characters
LONGEST_STAND_IN = 100  # characters of a token that stands in for other texts

# Parts in addition to the model, and the key for the steps of a sequence.
_INSIDE = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
# An expression with one of these, not escaped or in a class, may match the empty text.
_MATCHES_NOTHING = re.compile(r"[*?|(^$]|\{[0,]|\\[bBAzZGKyY]")
_PLAIN = re.compile(r"\[\^|\\\W")


def check_parts(description: Any) -> None:
    """Checks all parts of a tokenizer.json except its model, before it is loaded.

    Raises ValueError if they could expand a text far more than a tokenizer needs to, or are not
    parts of a tokenizer.
    """
    if not isinstance(description, dict):
        raise ValueError("it is no object")
    parts = _one_form(description)
    for part in _INSIDE:
        if (count := sum(1 for _ in _steps(parts, part))) > MOST_STEPS:
            raise ValueError(f"its {part} has {count:,} steps, more than {MOST_STEPS:,}")
    for part, most in (
        ("normalizer", MOST_NORMALIZED),
        ("pre_tokenizer", MOST_SPLIT),
        ("decoder", MOST_DECODED),
    ):
        if (made := growth(parts, part)) > most:
            raise ValueError(
                f"its {part} could make {_rounded(made)} characters of one, more than {most}"
            )
    if (around := sum(map(_put_around, _steps(parts, "post_processor")))) > MOST_AROUND:
        raise ValueError(f"it puts {around:,} tokens around a text, more than {MOST_AROUND:,}")


def check_tokens(tokenizer: "Tokenizer") -> None:
    """Raises ValueError if a token is too long, since a text may consist of such tokens."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    longest = max(vocabulary, key=len, default="")
    if len(longest) > LONGEST_TOKEN:
        raise ValueError(
            f"its token {longest[:20]!r}... has {len(longest):,} characters, more than "
            f"{LONGEST_TOKEN:,}"
        )
    unknown = getattr(tokenizer.model, "unk_token", None)
    stand_ins = [] if unknown is None else [unknown]
    if len(vocabulary) > len(set(vocabulary.values())):
        shared = {id for id, count in Counter(vocabulary.values()).items() if count > 1}
        stand_ins += [token for token, id in vocabulary.items() if id in shared]
    longest = max(stand_ins, key=len, default="")
    if len(longest) > LONGEST_STAND_IN:
        raise ValueError(
            f"its token {longest[:20]!r}..., which stands for others, has {len(longest):,} "
            f"characters, more than {LONGEST_STAND_IN}"
        )


def growth(description: Mapping[str, Any], part: str) -> int:
    """Returns the largest number of characters that a part makes of one character.

    The part is the "normalizer", the "pre_tokenizer" or the "decoder". Growth by Unicode's own
    normalization forms is not counted. `description` is in the form written by `tokenizers`.
    """
    most = 1
    made: set[str] | None = set()  # possible characters of expanded text; None for any
    for step in _steps(description, part):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                new = unicodedata.normalize("NFKD", new)
                own = max(1, -(-len(new) // len(old)))
                again = made is None or not made.isdisjoint(old)
                most = most * own if again else max(most, own)
                if made is not None and (again or own > 1):
                    made |= set(new)
                continue
            case {"type": "Replace", "pattern": pattern, "content": str(new)}:
                old, new = pattern.get("Regex", ""), unicodedata.normalize("NFKD", new)
                between = not old or _MATCHES_NOTHING.search(_PLAIN.sub(".", old)) is not None
                most *= 1 + 2 * len(new) if between else max(1, len(new))
            case {"type": "Prepend", "prepend": str(begin)}:
                most += len(begin)
                if made is not None:
                    made |= set(begin)
                continue
            case {"type": "ByteLevel"}:  # a character for each byte
                most = 4 * most + 1
            case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
                most *= _longest_in(table)
            case {"type": "BPEDecoder", "suffix": ""} | {"type": "CTC", "word_delimiter_token": ""}:
                most *= 3
            case {"type": "BertNormalizer" | "Metaspace" | "WordPiece" | "CTC"}:  # spaces
                most += 2
        if most > 1:
            made = None
    return most


def _one_form(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts in the form that `tokenizers` writes now; older versions differ."""
    from tokenizers import Tokenizer

    alone: dict[str, Any] = {part: description.get(part) for part in _INSIDE}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    alone |= {"version": "1.0", "added_tokens": [], "model": model}
    return json.loads(Tokenizer.from_str(json.dumps(alone)).to_str())


def _steps(description: Mapping[str, Any], part: str) -> Iterator[dict[str, Any]]:
    waiting = [description[part]]
    while waiting:
        step = waiting.pop()
        if step is not None and step["type"] == "Sequence":
            waiting += reversed(step[_INSIDE[part]])
        elif step is not None:
            yield step


def _put_around(step: Mapping[str, Any]) -> int:
    """Returns the number of tokens that a step of the post-processor adds."""
    if step["type"] != "TemplateProcessing":
        return 2
    ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
    pieces = [*step["single"], *step["pair"]]
    return sum(ids.get(each["SpecialToken"]["id"], 0) for each in pieces if "SpecialToken" in each)


def _longest_in(table: str) -> int:
    """Returns the length in characters of the longest text in a SentencePiece table.

    The table has the size of an index, the index, and texts that each end in a zero byte
    (https://github.com/huggingface/spm_precompiled).
    """
    content = base64.b64decode(table)
    (size,) = struct.unpack_from("<I", content)
    texts = content[4 + size :].decode("utf-8", "replace").split("\0")
    return max(1, *map(len, texts))


def _rounded(number: int) -> str:
    return f"{number:,}" if number < 10**12 else f"10^{math.floor(math.log10(number))}"
