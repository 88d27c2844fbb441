"""A split of conversations, or of pairs of them."""

import hashlib
import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from data_tools.held_out import Part
from data_tools.prepare_chats.chats import ChatRecipe
from data_tools.prepare_chats.conversations import ConversationField
from data_tools.prepare_chats.documents import Templated
from data_tools.prepare_chats.lengths import TooLong
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.progress import Progress
from data_tools.pretokenize.writing import FILE_LENGTH, OnBadRow, write_shard
from data_tools.rows import Block, Row, RowSource
from data_tools.tokenizer import Tokenizer
from lmlib.data.chats.chat import ChatTemplate, write_chat_template
from lmlib.data.stored.metadata import SplitMetadata, read_split

NOW = datetime(2024, 7, 26)  # what Llama 3.1's template takes for today if it is not told


def prepare_chats(
    source: RowSource,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    out: str | Path,
    split: str,
    *,
    max_length: int | None = None,
    too_long: TooLong = "drop",
    now: datetime = NOW,
    part: Part | None = None,
    workers: int = 0,
    on_bad_row: OnBadRow = "fail",
    progress: Callable[[Progress], None] | None = None,
    skipped: Callable[[Block, Row], None] | None = None,
    file_length: int = FILE_LENGTH,
) -> SplitMetadata:
    """Writes the conversations of the source as the split `out`/`split`, or what is missing of it.

    What the assistant says are the targets. The template is kept beside the tokenizer. Killed and
    called again, it goes on to the same bytes, which do not depend on `workers`.

    Args:
      source: rows whose field is a `ConversationField`.
      template: makes a text of a conversation; None: each is a prompt and a response, encoded
        apart, after BOS and before EOS.
      max_length: tokens of the longest conversation, or of both of a pair; None: any.
      too_long: what becomes of a longer one; pairs are dropped.
      now: what the template takes for the time.

    See `pretokenize_shard` for the others, and for what is raised.
    """
    field = source.field
    if not isinstance(field, ConversationField):
        raise ValueError(f"the rows of {source.description} are read as texts, not conversations")
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length must be at least 2, not {max_length}")
    if field.pairs and too_long != "drop":
        raise ValueError(f"pairs are never cut: choose 'drop' for too_long, not {too_long!r}")
    if template is None and tokenizer.eos_id is None:
        raise ValueError(
            f"cannot tell which token of {tokenizer.identity.name} ends a response: name it with "
            "--eos_token, or give a --template"
        )
    if template is not None and not (part is not None and part.held_out):  # which is told already
        _tell_of_missing_ends(Templated(template, now, tokenizer.tokenizer_json))
    described = source.description | {
        "template_sha256": None if template is None else _digest(template),
        "date": f"{now:%Y-%m-%d}",
        "max_length": max_length,
        "too_long": too_long,
    }
    if part is not None:
        described |= {"validation_fraction": part.fraction, "held_out": part.held_out}
    framing = (tokenizer.bos_id, tokenizer.eos_id) if template is None else (None, None)
    recipe = ChatRecipe(
        encoder=tokenizer.encoder if template is None else None,
        tokenizer_json=tokenizer.tokenizer_json,
        bos_id=framing[0],
        eos_id=framing[1],
        vocab_size=tokenizer.vocab_size,
        field=field,
        part=part,
        templates={} if template is None else template.sources,
        special_tokens={} if template is None else template.special_tokens,
        now=now,
        max_length=max_length,
        too_long=too_long,
    )
    folder = OutFolder(out)
    if template is not None:
        write_chat_template(folder.path, template)
    write_shard(
        source,
        recipe,
        tokenizer,
        folder,
        split,
        described=described,
        content="pairs" if field.pairs else "conversations",
        bos_id=framing[0],
        eos_id=framing[1],
        part=part,
        workers=workers,
        on_bad_row=on_bad_row,
        progress=progress,
        skipped=skipped,
        file_length=file_length,
    )
    return read_split(folder.path / split)


def _tell_of_missing_ends(documents: Templated) -> None:
    if not documents.ends_answers():
        print(
            "WARNING: answers end with no special token of the tokenizer, so the model learns none "
            "to stop at: choose a --template whose answers end with one that the tokenizer has, or "
            "stop answers with --stop of runner.generate",
            file=sys.stderr,
        )


def _digest(template: ChatTemplate) -> str:
    content = [dict(template.sources), dict(template.special_tokens)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
