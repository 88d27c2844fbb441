"""The chat template that comes with a tokenizer, or another one."""

import os
from pathlib import Path

from lmlib.data.chat import CONFIG_FILE, TEMPLATE_FILE, ChatTemplate, read_chat_template


def load_template(tokenizer: str, file: str | None = None) -> ChatTemplate | None:
    """The template of the `tokenizer` as `load_tokenizer` takes it, or that in `file`.

    None if there is none, or `file` is "". Raises ValueError or OSError for a damaged file.
    """
    if file == "":
        return None
    instead = None if file is None else Path(os.path.expanduser(file))
    return read_chat_template(_folder(tokenizer), instead)


def _folder(tokenizer: str) -> Path:
    """Where the files are that belong to the tokenizer, fetched if need be."""
    path = Path(os.path.expanduser(tokenizer))
    if tokenizer == "bytes" or path.is_dir():
        return path
    if path.is_file():
        return path.parent

    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    folder = path
    for name in (CONFIG_FILE, TEMPLATE_FILE):
        try:
            folder = Path(hf_hub_download(tokenizer, name)).parent
        except EntryNotFoundError as error:
            # Without a network, none of the second can be told from one that was never fetched.
            if name == CONFIG_FILE and isinstance(error, LocalEntryNotFoundError):
                raise ValueError(f"{name} of {tokenizer!r} is not here, nor a network") from error
        except Exception as error:  # of the network, of the file system
            raise ValueError(
                f"{name} of {tokenizer!r} cannot be fetched from the Hugging Face Hub: {error}"
            ) from error
    return folder
