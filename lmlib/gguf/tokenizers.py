"""Tokenizers between tokenizer.json and GGUF.

llama.cpp knows two kinds of byte-pair encoding. `gpt2` has ranked merges within words, which one of
its named regular expressions finds. `llama`, SentencePiece's, merges any two neighbours that form a
token, the token with the highest score first. Source: src/llama-vocab.cpp of llama.cpp.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import gguf
from gguf import TokenType

from lmlib.data.text import read_tokenizer

_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{E}|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{E}|\p{N}{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = ("digits", None)  # each digit is a word; then GPT-2's words
_GPT2 = ("gpt2", None)
# Names of llama.cpp for how words are found, and whether words in the vocabulary skip the merges.
# The first of several that are the same is written.
_WORDS: dict[str, tuple[tuple[str, str | None], bool]] = {
    "gpt-2": (_GPT2, False),
    "olmo": (_GPT2, False),
    "mpt": (_GPT2, False),
    "smollm": (_DIGITS, False),
    "starcoder": (_DIGITS, False),
    "refact": (_DIGITS, False),
    "llama-bpe": (("regex", _REGEX), True),
    "llama3": (("regex", _REGEX), True),
    "dbrx": (("regex", _REGEX), False),
    "smaug-bpe": (("regex", _REGEX), False),
    "qwen2": (("regex", _REGEX.replace("{1,3}", "")), False),
    "stablelm2": (("regex", _REGEX.replace("{1,3}", "")), False),
    "gpt-4o": (
        ("regex", _CASED.replace("{E}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("{N}", "{1,3}")),
        False,
    ),
    "tekken": (("regex", _CASED.replace("{E}", "").replace("{N}", "")), True),
}
_SPECIAL = {"bos": "BOS_ID", "eos": "EOS_ID", "pad": "PAD_ID", "unk": "UNK_ID"}
_LAST = -1e9  # score of a token that no merge makes


def write(
    writer: gguf.GGUFWriter,
    tokenizer_json: str | None,
    chat_templates: Mapping[str, str],
    config: Mapping[str, Any],
) -> None:
    """Adds a tokenizer.json's text, and chat templates by name, to a file.

    Raises ValueError if llama.cpp has no such tokenizer, or no token is known to end texts.
    """
    if tokenizer_json is None:
        writer.add_tokenizer_model("none")
        return
    tokenizer = read_tokenizer(tokenizer_json, "tokenizer.json")
    content = json.loads(tokenizer_json)
    size, added = config["vocab_size"], tokenizer.get_added_tokens_decoder()
    names = {id: name for name, id in tokenizer.get_vocab(with_added_tokens=True).items()}
    if max(names) >= size:
        raise ValueError(f"the tokenizer has the id {max(names)}, but the model {size} tokens")
    unknown = content["model"].get("unk_token")
    kinds = []
    for id in range(size):
        kind = TokenType.NORMAL if id in names else TokenType.UNUSED
        if id in added:
            kind = TokenType.CONTROL if added[id].special else TokenType.USER_DEFINED
        kinds.append(kind)
    tokens = [names.get(id, f"[PAD{id}]") for id in range(size)]
    merges = [tuple(m.split(" ")) if isinstance(m, str) else (m[0], m[1])
              for m in content["model"].get("merges", ())]  # fmt: skip
    if content["model"].get("type") != "BPE" or not merges:
        kind = content["model"].get("type")
        raise ValueError(f"llama.cpp needs byte-pair encoding with merges, not a {kind} tokenizer")
    if content["model"].get("byte_fallback"):
        plain = {name: id for id, name in names.items() if id not in added}
        scores = _scores(tokens, plain, merges)
        for byte in range(256):
            if (name := f"<0x{byte:02X}>") in plain:
                kinds[plain[name]] = TokenType.BYTE
        if unknown in tokens:
            kinds[tokens.index(unknown)] = TokenType.UNKNOWN
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(_prefixes(content))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_words_of(content))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    ids = {name: config.get(f"{name}_token_id") for name in _SPECIAL}
    ids = {name: id[0] if isinstance(id, list) else id for name, id in ids.items()}
    if unknown in tokens:
        ids["unk"] = tokens.index(unknown)
    if ids["eos"] is None:
        raise ValueError("no token is known to end texts: give a tokenizer's folder that names it")
    for name, own in ids.items():
        if own is not None:
            writer.add_uint32(getattr(gguf.Keys.Tokenizer, _SPECIAL[name]), own)
    around = tokenizer.encode("", add_special_tokens=True).ids
    writer.add_add_bos_token(ids["bos"] is not None and around[:1] == [ids["bos"]])
    writer.add_add_eos_token(around[-1:] == [ids["eos"]] and ids["eos"] != ids["bos"])
    if chat_templates:
        named = [{"name": name, "template": text} for name, text in chat_templates.items()]
        writer.add_chat_template(named)


def read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of tokenizer.json and tokenizer_config.json, by name; {} without any.

    Raises ValueError if the kind of tokenizer is unknown, or its lists do not fit each other.
    """
    keys = gguf.Keys.Tokenizer
    kind = settings.get(keys.MODEL, "none")
    if kind in ("none", "no_vocab"):
        return {}
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{keys.MODEL} {kind!r:.80} is not supported; there are gpt2, llama")
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    tokens = settings[keys.LIST]
    kinds = settings.get(keys.TOKEN_TYPE) or [TokenType.NORMAL] * len(tokens)
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(kinds) != len(tokens):
        raise ValueError(f"{keys.LIST} holds equal tokens, or not as many as {keys.TOKEN_TYPE}")
    ids = {name: settings.get(getattr(keys, _SPECIAL[name])) for name in _SPECIAL}
    named = {name: tokens[id] for name, id in ids.items() if id is not None}
    if kind == "gpt2":
        name = settings.get(keys.PRE)
        if name not in _WORDS:
            raise ValueError(f"{keys.PRE} {name!r:.80} is not supported: {', '.join(_WORDS)} are")
        words, skips = _WORDS[name]
        pairs = [tuple(each.split(" ")) for each in settings[keys.MERGES]]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=skips))
        tokenizer.pre_tokenizer = _pre_tokenizer(*words)
        tokenizer.decoder = decoders.ByteLevel()
        if name in ("qwen2", "olmo"):
            tokenizer.normalizer = normalizers.NFC()
    else:
        normal = [token for token, own in zip(tokens, kinds, strict=True) if own == 1]
        model = models.BPE(
            vocab=vocab,
            merges=_merges(vocab, settings[keys.SCORES], normal),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=named.get("unk"),
        )
        tokenizer = Tokenizer(model)
        spaces = normalizers.Replace(" ", "▁")
        prefix = settings.get(keys.ADD_PREFIX, True)
        begin = [normalizers.Prepend("▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*begin, spaces])
        strip = [decoders.Strip(content=" ", left=1)] if prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    for token, own in zip(tokens, kinds, strict=True):
        if own in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
            special = own != TokenType.USER_DEFINED
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    if settings.get(keys.ADD_BOS, kind == "llama") and "bos" in named:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{named['bos']} $A", special_tokens=[(named["bos"], ids["bos"])]
        )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {f"{name}_token": token for name, token in named.items()}
    config |= {"model_input_names": ["input_ids", "attention_mask"]}
    if template := settings.get(keys.CHAT_TEMPLATE):
        config["chat_template"] = template
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": config}


def special_ids(settings: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of the tokens that config.json names."""
    keys = {name: getattr(gguf.Keys.Tokenizer, _SPECIAL[name]) for name in ("bos", "eos", "pad")}
    return {f"{name}_token_id": settings[key] for name, key in keys.items() if key in settings}


def _words_of(content: Mapping[str, Any]) -> str:
    """Returns llama.cpp's name for how a tokenizer.json finds words."""
    pre = content["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [pre])
    *before, last = steps
    normal = content["normalizer"] is None or content["normalizer"].get("type") == "NFC"
    found: tuple[str, str | None] | None = None
    if last.get("type") == "ByteLevel" and not last["add_prefix_space"] and normal:
        kinds = [each["type"] for each in before]
        if last["use_regex"]:
            found = {(): _GPT2, ("Digits",): _DIGITS}.get(tuple(kinds))
            if kinds == ["Digits"] and not before[0]["individual_digits"]:
                found = None
        elif kinds == ["Split"] and (before[0]["behavior"], before[0]["invert"]) == (
            "Isolated",
            False,
        ):
            found = ("regex", before[0]["pattern"].get("Regex"))
    skips = bool(content["model"].get("ignore_merges"))
    name = next((name for name, own in _WORDS.items() if own == (found, skips)), None)
    name = name or next((name for name, own in _WORDS.items() if own[0] == found), None)
    if name is None:
        raise ValueError(
            f"llama.cpp has no name for how this tokenizer finds words: {json.dumps(steps):.300}, "
            f"after the normalizer {json.dumps(content['normalizer']):.100}"
        )
    return name


def _pre_tokenizer(kind: str, regex: str | None) -> Any:
    from tokenizers import Regex, pre_tokenizers

    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "regex")
    if kind == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), last])
    if regex is None:
        return last
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), last])


def _prefixes(content: Mapping[str, Any]) -> bool:
    """True if SentencePiece's tokenizer begins each text with a space.

    Raises ValueError if it changes texts in another way.
    """
    normalizer, pre = content["normalizer"] or {}, content["pre_tokenizer"] or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [each["type"] for each in steps]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if spaces in steps and pre.get("type") in (None, "Split") and kinds[:-1] in ([], ["Prepend"]):
        return kinds[0] == "Prepend"
    if pre.get("type") == "Metaspace" and not steps and not pre.get("split"):
        return pre.get("prepend_scheme") != "never"
    raise ValueError(
        f"llama.cpp's SentencePiece tokenizer has no normalizer {json.dumps(normalizer):.200} with "
        f"{json.dumps(pre):.200}"
    )


def _scores(tokens: list[str], plain: Mapping[str, int], merges: list[Any]) -> list[float]:
    """Returns each token's score: minus the rank of the merges that make it.

    Raises ValueError if the merges do not follow from scores.
    """
    ranks: dict[str, int] = {}
    for left, right in merges:
        rank = ranks.setdefault(left + right, len(ranks))
        if rank != len(ranks) - 1:
            raise ValueError(f"the merges of {left + right!r} are not next to each other{_OTHER}")
    given = set(merges)
    parts = set(plain) | {letter for token in plain for letter in token}
    for token in plain:
        for left, right in _splits(token, parts):
            if (left, right) not in given:
                raise ValueError(f"{left!r} and {right!r} form a token but no merge{_OTHER}")
    return [-float(ranks[token]) if token in ranks else _LAST for token in tokens]


_OTHER = ", so that llama.cpp's SentencePiece tokenizer would give other tokens"


def _splits(token: str, vocab: Collection[str]) -> list[tuple[str, str]]:
    halves = ((token[:i], token[i:]) for i in range(1, len(token)))
    return [each for each in halves if each[0] in vocab and each[1] in vocab]


def _merges(vocab: Mapping[str, int], scores: list[float], normal: list[str]) -> list[Any]:
    """Returns the merges that SentencePiece's scores mean, in their order."""
    plain = {token: vocab[token] for token in normal}
    found: list[tuple[str, str]] = []
    for token in sorted(normal, key=lambda token: -scores[vocab[token]]):
        found += sorted(_splits(token, plain), key=lambda each: (vocab[each[0]], vocab[each[1]]))
    return found
