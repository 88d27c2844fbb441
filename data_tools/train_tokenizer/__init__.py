"""Learns a byte-level BPE from text."""

from data_tools.train_tokenizer.byte_level_bpe import (
    SPECIAL_TOKENS,
    Style,
    train_byte_level_bpe,
)

__all__ = ["SPECIAL_TOKENS", "Style", "train_byte_level_bpe"]
