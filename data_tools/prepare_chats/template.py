"""The chat template that comes with a tokenizer, or another one."""

import json
import os
from pathlib import Path

from lmlib.data.chat import ChatTemplate, read_chat_template
from lmlib.whole_file import write_whole

CONFIG_FILE = "tokenizer_config.json"
_FILES = (CONFIG_FILE, "chat_template.jinja")
BYTES = "bytes"


def load_template(tokenizer: str, file: str | None = None) -> ChatTemplate | None:
    """The template of the `tokenizer` as `load_tokenizer` takes it, or that in `file`.

    None if there is none, or `file` is "". Raises ValueError or OSError for a damaged file.
    """
    if file == "":
        return None
    instead = None if file is None else Path(os.path.expanduser(file))
    return read_chat_template(_folder(tokenizer), instead)


def keep_template(template: ChatTemplate, data_set: Path) -> None:
    """Writes the template beside the data set's tokenizer, as tokenizers keep it.

    Raises FileExistsError if another one is there.
    """
    named = [{"name": name, "template": text} for name, text in template.sources.items()]
    content = {**template.special_tokens, "chat_template": named}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    file = data_set / CONFIG_FILE
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise FileExistsError(
            f"{file} holds another chat template: choose another folder, or delete it if it is of "
            "no use any more"
        )
    data_set.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)


def _folder(tokenizer: str) -> Path:
    """Where the files are that belong to the tokenizer, fetched if need be."""
    path = Path(os.path.expanduser(tokenizer))
    if tokenizer == BYTES or path.is_dir():
        return path
    if path.is_file():
        return path.parent

    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    folder = path
    for name in _FILES:
        try:
            folder = Path(hf_hub_download(tokenizer, name)).parent
        except EntryNotFoundError:
            continue
        except Exception as error:  # of the network, of the file system
            raise ValueError(
                f"{name} of {tokenizer!r} cannot be fetched from the Hugging Face Hub: {error}"
            ) from error
    return folder
