"""Small trained tokenizers of the kinds that GGUF files hold."""

import functools
import json

from small_tokenizer import TEXTS
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

SAMPLES = [
    *TEXTS,
    "  two  spaces, and\ttabs\n\n\nlines 12345 I'M we'Ll don't",
    "🚀 émoji 日本語 かな Ünïcode x² naïve",
    "",
    " ",
    "a",
]
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_WORDS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "dbrx": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _BYTES]),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_LLAMA3.replace("{1,3}", "")), "isolated"), _BYTES]
    ),
}
NAMES = [*_WORDS, "llama"]


@functools.cache
def tokenizer_json(name):
    """Returns a tokenizer.json with 400 tokens; 0 begins texts and 1 ends them."""
    if name == "llama":
        return _sentencepiece()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _WORDS[name]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    if name != "gpt-2":
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


def _sentencepiece():
    """Like Llama 2's: unknown characters become bytes, and every split of a token is a merge."""
    plain = Tokenizer(models.BPE())
    plain.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=140, show_progress=False)
    plain.train_from_iterator(TEXTS * 3, trainer)
    learned = [tuple(pair) for pair in json.loads(plain.to_str())["model"]["merges"]]
    tokens = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "▁")} - {"\n"})
    made = [token for left, right in learned if "\n" not in (token := left + right)]
    made = list(dict.fromkeys(made))
    vocab = {token: i for i, token in enumerate([*tokens, *letters, *made])}
    merges = [
        (token[:i], token[i:])
        for token in made
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = plain.normalizer
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )  # fmt: skip
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()
