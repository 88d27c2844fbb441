"""From the conversations of a block to tokens with their loss mask."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from data_tools.encoders import Encoder
from data_tools.encoding import EncodedBlock
from data_tools.held_out import Part
from data_tools.prepare_chats.conversations import ConversationField, read_conversations
from data_tools.prepare_chats.documents import Document, Documents, Plain, Templated
from data_tools.prepare_chats.lengths import TooLong, shortened
from data_tools.rows.block import Block, Row
from lmlib.data.chats.chat import ChatTemplate

_LEFT_OUT = ("dropped_documents", "dropped_tokens", "cut_documents", "cut_tokens")


@dataclass(frozen=True)
class ChatRecipe:
    """Documents are conversations or their parts, or two by two the answers of a pair; see
    `Recipe`.

    Attributes:
      encoder: of plain text, see `Plain`; None: conversations go through a template.
      templates, special_tokens: see `ChatTemplate`.
      now: what a template takes for the time.
      max_length: tokens of the longest conversation, or of both of a pair; None: any.
    """

    encoder: Encoder | None
    tokenizer_json: str | None
    bos_id: int | None
    eos_id: int | None
    vocab_size: int
    field: ConversationField
    part: Part | None  # whose documents are kept; None: all
    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    now: datetime
    max_length: int | None
    too_long: TooLong

    def block_encoder(self) -> "ChatEncoder":
        """See `Recipe.block_encoder`."""
        return ChatEncoder(self)


class ChatEncoder:
    """See `BlockEncoder`."""

    def __init__(self, recipe: ChatRecipe) -> None:
        self._recipe = recipe
        self._documents: Documents[Any]
        if recipe.encoder is not None:
            self._documents = Plain(recipe.encoder, recipe.bos_id, recipe.eos_id)
        else:
            template = ChatTemplate(recipe.templates, recipe.special_tokens)
            self._documents = Templated(template, recipe.now, recipe.tokenizer_json)
        self._dtype = np.uint16 if recipe.vocab_size <= 2**16 else np.uint32

    def encode(self, block: Block) -> EncodedBlock:
        """The block's conversations; a row that has none with a response is among the bad rows."""
        bad_rows: dict[int, Row] = {}  # by their number in the block
        read = {}
        part = self._recipe.part
        for number, row in enumerate(block.rows(self._recipe.field)):
            if row.text is None:
                if part is None or not part.held_out:  # so that it counts once
                    bad_rows[number] = row
            elif part is None or part.has(row.text):
                read[number] = row.where, read_conversations(row.text)
        found = self._documents.texts([conversations for _, conversations in read.values()])
        texts_of_rows = {}
        for (number, (where, _)), texts in zip(read.items(), found, strict=True):
            if isinstance(texts, ValueError):
                bad_rows[number] = Row(where, None, f"cannot be taken: {texts}")
            else:
                texts_of_rows[number] = texts
        coming = iter(
            self._documents.encoded([text for texts in texts_of_rows.values() for text in texts])
        )
        kept: list[Document] = []
        left_out = dict.fromkeys(_LEFT_OUT, 0)
        for number, texts in texts_of_rows.items():
            documents = [next(coming) for _ in texts]
            if not documents or not all(each.is_target[1:].any() for each in documents):
                bad_rows[number] = Row(read[number][0], None, "has no response")
            elif self._recipe.field.pairs:
                kept += self._fitting(documents, left_out)
            else:
                for document in documents:
                    kept += self._fitting([document], left_out)
        nothing = np.zeros(0, self._dtype), np.zeros(0, bool)
        ids = np.concatenate([nothing[0], *(document.ids for document in kept)])
        return EncodedBlock(
            tokens=ids.astype(self._dtype),
            lengths=np.array([len(document.ids) for document in kept], np.int64),
            text_bytes=np.array([document.text_bytes for document in kept], np.int64),
            gzip_bytes=None,
            bad_rows=tuple((0, bad_rows[number]) for number in sorted(bad_rows)),
            loss_mask=np.concatenate([nothing[1], *(document.is_target for document in kept)]),
            left_out=left_out,
        )

    def _fitting(self, documents: list[Document], left_out: dict[str, int]) -> list[Document]:
        """The documents if they are short enough, or what is kept of one; counts the rest."""
        longest, tokens = self._recipe.max_length, sum(len(each.ids) for each in documents)
        if longest is None or tokens <= longest:
            return documents
        found, kept = documents[0], None
        if len(documents) == 1:
            kept = shortened(found.ids, found.is_target, longest, self._recipe.too_long)
        if kept is None:
            left_out["dropped_documents"] += len(documents)
            left_out["dropped_tokens"] += tokens
            return []
        left_out["cut_documents"] += 1
        left_out["cut_tokens"] += tokens - len(found.ids[kept])
        return [Document(found.ids[kept], found.is_target[kept], found.text_bytes)]
