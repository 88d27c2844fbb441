"""The chat template of a tokenizer, one of ours, or another one, for prepare_chats."""

import os
from pathlib import Path

from lmlib.data.chats.chat import (
    CONFIG_FILE,
    DEFAULT,
    TEMPLATE_FILE,
    ChatTemplate,
    read_chat_template,
)

_OURS = Path(__file__).parent / "templates"  # of well-known models, with their answers marked


def template_names() -> list[str]:
    """The names of our own templates."""
    return sorted(file.stem for file in _OURS.glob("*.jinja"))


def load_template(tokenizer: str, template: str | None = None) -> ChatTemplate | None:
    """The template of the `tokenizer` as `load_tokenizer` takes it, or another for that.

    Args:
      template: the name of one of ours, or a file; "": none.

    None if it has none. Raises ValueError or OSError if the template is absent or damaged,
    or ours needs a token that the tokenizer has no name for.
    """
    if template == "":
        return None
    if template is None:
        return read_chat_template(_folder(tokenizer))
    if template in template_names():
        ours = read_chat_template(_folder(tokenizer), _OURS / f"{template}.jinja")
        if ours is not None:
            _check_tokens(ours, template, tokenizer)
        return ours
    file = Path(os.path.expanduser(template))
    if not file.is_file():
        raise FileNotFoundError(
            f"--template={template} is neither a file nor one of {', '.join(template_names())}"
        )
    return read_chat_template(_folder(tokenizer), file)


def _check_tokens(template: ChatTemplate, name: str, tokenizer: str) -> None:
    for token in ("bos_token", "eos_token"):
        if token in template.sources[DEFAULT] and token not in template.special_tokens:
            remedy = "choose another template"
            if tokenizer != "bytes":  # it has no folder
                remedy = f'write "{token}" there, or {remedy}'
            raise ValueError(
                f"--template={name} writes a {token}, and {CONFIG_FILE} of --tokenizer={tokenizer} "
                f"names none: {remedy}"
            )


def _folder(tokenizer: str) -> Path:
    """The folder of the tokenizer's files, fetched if need be."""
    path = Path(os.path.expanduser(tokenizer))
    if tokenizer == "bytes" or path.is_dir():
        return path
    if path.is_file():
        return path.parent

    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(tokenizer, allow_patterns=[CONFIG_FILE, TEMPLATE_FILE]))
        if not (folder / CONFIG_FILE).is_file():  # which every tokenizer of the Hub has
            raise FileNotFoundError(f"there is no {CONFIG_FILE}")
        return folder
    except Exception as error:  # of the network, of the file system
        raise ValueError(
            f"{CONFIG_FILE} of {tokenizer!r} cannot be fetched from the Hugging Face Hub: {error}"
        ) from error
