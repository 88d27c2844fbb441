"""Tokenizers as objects of `transformers`."""

from typing import TYPE_CHECKING, Any

from lmlib.data.chats.chat import DEFAULT, ChatTemplate
from lmlib.data.stored.metadata import tokenizers_differ
from lmlib.data.text import BYTE_TOKENIZER
from runner.errors import ConfigError, user_errors
from runner.inference.loaded import Loaded
from runner.weights.texts import tokenizer_of

if TYPE_CHECKING:  # slow to import
    from tokenizers import Tokenizer


def hugging_face_tokenizer(loaded: Loaded) -> Any:
    """Returns a `PreTrainedTokenizerBase` for the model's ids.

    If the model comes from a folder, this is the folder's tokenizer, as `AutoTokenizer` loads it.
    Otherwise it is the tokenizer of the data, and begins each text as the data begins each
    document. Raises ConfigError if no tokenizer is known, it cannot be loaded, or transformers is
    missing.
    """
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            f"transformers is missing: pip install 'lmlib[eval]' ({error})"
        ) from error

    folder = loaded.tokenizer_folder
    with user_errors():
        if folder is not None and not tokenizers_differ(
            tokenizer_of(folder, str(folder)), loaded.tokenizer
        ):
            own = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            return _with_template(own, loaded.chat_template)
        tokenizer = _of_data(loaded)
    begin = [] if loaded.codec is None else loaded.codec.encode("")
    ends = [*loaded.end_ids[:1]] if loaded.document_end is None else [loaded.document_end]
    named = {"bos_token": begin, "eos_token": ends}
    template = loaded.chat_template
    of_template = {} if template is None else template.special_tokens
    tokens: dict[str, Any] = {name: of_template[name] for name in named if name in of_template}
    tokens |= {name: tokenizer.id_to_token(id) for name, ids in named.items() for id in ids}
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=bool(begin),
        clean_up_tokenization_spaces=False,
        **tokens,
    )
    return _with_template(made, template)


def _with_template(tokenizer: Any, template: ChatTemplate | None) -> Any:
    if template is not None:
        several = len(template.sources) > 1
        tokenizer.chat_template = dict(template.sources) if several else template.sources[DEFAULT]
    return tokenizer


def _of_data(loaded: Loaded) -> "Tokenizer":
    from tokenizers import Tokenizer

    if loaded.tokenizer_file is not None:
        return Tokenizer.from_file(str(loaded.tokenizer_file))
    if loaded.tokenizer == BYTE_TOKENIZER:
        return _of_bytes(loaded.model.vocab)
    raise ConfigError(f"no tokenizer of {loaded.name} is known: give --tokenizer")


def _of_bytes(vocab: int) -> "Tokenizer":
    """Returns a byte tokenizer: ids below 256 are UTF-8 bytes, the others special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Printable bytes stand for themselves; the other characters follow in order.
    characters = pre_tokenizers.ByteLevel.alphabet()
    unseen = iter(sorted(set(characters) - set(map(chr, range(256)))))
    names = [chr(byte) if chr(byte) in characters else next(unseen) for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({name: byte for byte, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{id}>" for id in range(256, vocab)])
    return tokenizer
