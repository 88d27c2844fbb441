"""Chat templates for prepare_chats: the tokenizer's, a bundled one, or a file."""

import os
from pathlib import Path

from lmlib.data.chats.chat import (
    CONFIG_FILE,
    DEFAULT,
    TEMPLATE_FILE,
    ChatTemplate,
    read_chat_template,
)

_OURS = Path(__file__).parent / "templates"  # of well-known models, with the answers marked


def template_names() -> list[str]:
    """Returns the names of the bundled templates."""
    return sorted(file.stem for file in _OURS.glob("*.jinja"))


def load_template(tokenizer: str, template: str | None = None) -> ChatTemplate | None:
    """Returns the chat template for a `tokenizer` of `load_tokenizer`; None if it has none.

    `template` is the name of a bundled one, or a file, or "" for none. Raises ValueError or OSError
    if it is absent or damaged, or a bundled one needs a token that the tokenizer does not name.
    """
    if template == "":
        return None
    if template is None:
        return read_chat_template(_folder(tokenizer))
    bundled = template in template_names()
    file = _OURS / f"{template}.jinja" if bundled else Path(os.path.expanduser(template))
    if not file.is_file():
        raise FileNotFoundError(
            f"--template={template} is neither a file nor one of {', '.join(template_names())}"
        )
    found = read_chat_template(_folder(tokenizer), file)
    if found is None or not bundled:
        return found
    for token in ("bos_token", "eos_token"):
        if token in found.sources[DEFAULT] and token not in found.special_tokens:
            remedy = "choose another template"
            if tokenizer != "bytes":  # which has no such file
                remedy = f'write "{token}" there, or {remedy}'
            raise ValueError(
                f"--template={template} writes a {token}, and {CONFIG_FILE} of "
                f"--tokenizer={tokenizer} names none: {remedy}"
            )
    return found


def _folder(tokenizer: str) -> Path:
    """Returns the folder of the tokenizer's files, downloaded if necessary."""
    path = Path(os.path.expanduser(tokenizer))
    if tokenizer == "bytes" or path.is_dir():
        return path
    if path.is_file():
        return path.parent

    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(tokenizer, allow_patterns=[CONFIG_FILE, TEMPLATE_FILE]))
        if not (folder / CONFIG_FILE).is_file():  # every tokenizer on the Hub has it
            raise FileNotFoundError(f"there is no {CONFIG_FILE}")
        return folder
    except Exception as error:  # of the network, of the file system
        raise ValueError(
            f"{CONFIG_FILE} of {tokenizer!r} cannot be fetched from the Hugging Face Hub: {error}"
        ) from error
