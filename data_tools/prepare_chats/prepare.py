"""Writes splits of conversations, or of pairs of them, for prepare_chats."""

import hashlib
import json
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_tools.encoding import EncodedBlock
from data_tools.held_out import Part
from data_tools.prepare_chats.conversations import (
    ConversationField,
    read_conversations,
    read_label,
)
from data_tools.prepare_chats.documents import Document, Plain, Templated
from data_tools.prepare_chats.labelled import after_its_prompt, labelled
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.writing import write_shard
from data_tools.rows.block import Block, Row, RowSource
from data_tools.tokenizer import Tokenizer
from lmlib.data.chats.chat import ChatTemplate, write_chat_template
from lmlib.data.stored.metadata import IN_TWOS, SplitMetadata, read_split

# Handling of a conversation that is too long. drop: leave it out. cut_prompt: remove its beginning,
# up to the first response at most. cut_turns: remove its end, after the last complete response.
# A response is never cut: if that is impossible, the conversation is dropped.
Overflow = Literal["drop", "cut_prompt", "cut_turns"]

NOW = datetime(2024, 7, 26)  # the default date of Llama 3.1's template

_LEFT_OUT = ("dropped_documents", "dropped_tokens", "cut_documents", "cut_tokens")


def prepare_chats(
    source: RowSource,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    out: str | Path | OutFolder,
    split: str,
    *,
    max_length: int | None = None,
    overflow: Overflow = "drop",
    now: datetime = NOW,
    part: Part | None = None,
    **settings: Any,
) -> SplitMetadata:
    """Writes the conversations of the source as the split `out`/`split`, or the missing ones.

    The assistant's answers are the targets. The template is stored with the tokenizer. If it is
    killed and called again, it continues to the same bytes, which do not depend on `workers`.

    Args:
      source: rows whose field is a `ConversationField`.
      template: renders a conversation; None encodes each prompt and response separately, after BOS
        and before EOS.
      max_length: tokens of the longest conversation, or of both of a pair; None for any.
      overflow: the handling of longer ones; pairs are dropped.
      now: the time seen by the template.
      settings: see `write_shard`, also for the errors.
    """
    field = source.field
    if not isinstance(field, ConversationField):
        raise ValueError(f"the rows of {source.description} are read as texts, not conversations")
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length must be at least 2, not {max_length}")
    if field.content in IN_TWOS and overflow != "drop":
        raise ValueError(f"pairs are never cut: choose 'drop' for overflow, not {overflow!r}")
    if template is None and tokenizer.eos_id is None:
        raise ValueError(
            f"cannot tell which token of {tokenizer.identity.name} ends a response: name it with "
            "--eos_token, or give a --template"
        )
    framing = (tokenizer.bos_id, tokenizer.eos_id) if template is None else (None, None)
    folder, digest = OutFolder.of(out), None
    if template is None:
        documents: Plain | Templated = Plain(tokenizer)
    else:
        documents = templated = Templated(template, now, tokenizer.tokenizer_json)
        # For held-out conversations the user has been warned already.
        if not (part is not None and part.held_out) and not templated.ends_answers():
            print(
                "WARNING: answers end with no special token of the tokenizer, so the model does "
                "not learn where to stop: choose a --template whose answers end with a token that "
                "the tokenizer has, or stop answers with --stop of runner.generate",
                file=sys.stderr,
            )
        content = [dict(template.sources), dict(template.special_tokens)]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        write_chat_template(folder.path, template)
    recorded = {
        "template_sha256": digest,
        "date": f"{now:%Y-%m-%d}",
        "max_length": max_length,
        "overflow": overflow,
    }
    write_shard(
        source,
        ChatRecipe(documents, tokenizer.dtype, field, part, max_length, overflow),
        tokenizer,
        folder,
        split,
        described=source.description | recorded,
        content=field.content,
        framing=framing,
        part=part,
        **settings,
    )
    return read_split(folder.path / split)


@dataclass(frozen=True)
class ChatRecipe:
    """See `Recipe`: documents are conversations or parts of them, or the answers of pairs.

    A labelled answer is followed by the answer of the row before it in the block, after the same
    prompt.
    """

    documents: Plain | Templated
    dtype: np.dtype
    field: ConversationField
    part: Part | None  # whose documents are kept; None: all
    max_length: int | None  # tokens of the longest conversation, or of both of a pair; None: any
    overflow: Overflow

    def encode(self, block: Block) -> EncodedBlock:
        """Returns the block's conversations; a row without a response is among the bad rows."""
        bad_rows: list[tuple[int, Row]] = []
        found: list[list[Document]] = []  # to keep or leave out together
        kept: list[Document] = []
        left_out = dict.fromkeys(_LEFT_OUT, 0)
        for row in block.rows(self.field):
            if row.text is None:
                if self.part is None or not self.part.held_out:  # count it only once
                    bad_rows.append((0, row))
                continue
            if self.part is not None and not self.part.has(row.text):
                continue
            try:
                documents = self.documents.of_row(read_conversations(row.text))
            except ValueError as error:
                bad_rows.append((0, Row(row.where, None, f"cannot be taken: {error}")))
                continue
            if not documents or not all(each.is_target[1:].any() for each in documents):
                bad_rows.append((0, Row(row.where, None, "has no response")))
            elif self.field.labels:
                found.append([labelled(documents[-1], read_label(row.text))])
            else:
                found += [documents] if self.field.pairs else [[one] for one in documents]
        if self.field.labels:
            answers = [answer for (answer,) in found]
            others = answers[-1:] + answers[:-1]
            found = [[a, after_its_prompt(a, o)] for a, o in zip(answers, others, strict=True)]
        for together in found:
            kept += self._fitting(together, left_out)
        ids = np.concatenate([np.zeros(0, self.dtype), *(each.ids for each in kept)])
        return EncodedBlock(
            tokens=ids.astype(self.dtype),
            lengths=np.array([len(each.ids) for each in kept], np.int64),
            text_bytes=np.array([each.text_bytes for each in kept], np.int64),
            gzip_bytes=None,
            bad_rows=tuple(bad_rows),
            loss_mask=np.concatenate([np.zeros(0, bool), *(each.is_target for each in kept)]),
            left_out=left_out,
        )

    def _fitting(self, documents: list[Document], left_out: dict[str, int]) -> list[Document]:
        """Returns the documents that fit, or the kept part of one; counts the rest."""
        tokens = sum(len(each.ids) for each in documents)
        if self.max_length is None or tokens <= self.max_length:
            return documents
        found, kept = documents[0], None
        if len(documents) == 1:
            kept = shortened(found.ids, found.is_target, self.max_length, self.overflow)
        if kept is None:
            left_out["dropped_documents"] += len(documents)
            left_out["dropped_tokens"] += tokens
            return []
        left_out["cut_documents"] += 1
        left_out["cut_tokens"] += tokens - len(found.ids[kept])
        return [Document(found.ids[kept], found.is_target[kept], found.text_bytes)]


def shortened(
    ids: np.ndarray, is_target: np.ndarray, longest: int, overflow: Overflow
) -> slice | None:
    """Returns the kept ids of a conversation with more than `longest`; None to drop it."""
    targets = np.flatnonzero(is_target)
    if overflow == "cut_prompt":
        begin = len(ids) - longest
        # Keep a token before the first target, to predict it.
        return slice(begin, len(ids)) if begin < targets[0] else None
    if overflow == "cut_turns":
        ends = 1 + targets[np.flatnonzero(np.diff(targets, append=len(ids) + 1) > 1)]
        kept = ends[ends <= longest]
        return slice(0, int(kept[-1])) if len(kept) else None
    return None
