"""Trains byte-level BPE with pre-tokenization styles of well-known models.

For `python -m data_tools.train_tokenizer` and the data set of the standard library.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from data_tools.tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, JsonTokenizer

Style = Literal["gpt2", "llama3", "qwen2"]
STYLES: tuple[Style, ...] = get_args(Style)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# The default special tokens of a style, under names that `load_tokenizer` knows.
SPECIAL_TOKENS: dict[Style, tuple[str, ...]] = {
    "gpt2": ("<|endoftext|>",),
    "llama3": (
        *(BEGIN_OF_TEXT, END_OF_TEXT),
        *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),  # for chats
    ),
    "qwen2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
}


def train_byte_level_bpe(
    documents: Iterable[str],
    vocab_size: int,
    name: str = "byte-level BPE",
    style: Style = "gpt2",
    special_tokens: Sequence[str] = (BEGIN_OF_TEXT, END_OF_TEXT),
) -> JsonTokenizer:
    """Trains a byte-level BPE with at most `vocab_size` ids; deterministic for the same documents.

    The first ids are the special tokens. The 256 bytes follow, so that any text round-trips. The
    style is the way in which a text is split before merging; Qwen 2's first normalises it to
    Unicode's NFC. Source: Radford et al., "Language Models are Unsupervised Multitask Learners"
    (2019), section 2.2.

    Raises ValueError for a vocab_size without room for these, or special tokens that are empty or
    repeated.
    """
    least = 256 + len(special_tokens)
    if vocab_size < least:
        raise ValueError(
            f"byte-level BPE needs a vocab_size of at least {least}, not {vocab_size}: 256 bytes "
            f"and {len(special_tokens)} special tokens"
        )
    if not all(special_tokens) or len(set(special_tokens)) < len(special_tokens):
        raise ValueError(f"the special tokens {list(special_tokens)} hold an empty or equal names")
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as UntrainedTokenizer

    tokenizer = UntrainedTokenizer(models.BPE())
    if style == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        cut = Regex(_LLAMA3 if style == "llama3" else _QWEN2)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(cut, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if style == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return JsonTokenizer(name, tokenizer.to_str(pretty=True))
