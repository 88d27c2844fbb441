"""Finds folders by their names on Hugging Face's Hub."""

import os
import re
from pathlib import Path

from lmlib.models.families.hugging_face.settings import FolderError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
SETTINGS = ("config.json", "generation_config.json")
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def local_folder_of(name: str | Path, weights: bool = True) -> Path:
    """Returns the local folder `name`, or else a local copy of the Hub's repository `name`.

    Copies are in the cache of `huggingface_hub`, which shows the progress of downloads. Only
    settings, tokenizer files and safetensors are downloaded. Raises FolderError if neither the
    folder nor the name exists, or the network is unavailable.

    Args:
      weights: True if the tensors are needed too.
    """
    folder = Path(os.path.expanduser(name))
    if folder.exists() or not _NAME.fullmatch(str(name)):
        return folder

    from huggingface_hub import snapshot_download  # 0.2 s to import
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = [*SETTINGS, *TOKENIZER_FILES, "*.safetensors.index.json"]
    if weights:
        wanted.append("*.safetensors")
    try:
        # Subfolders, and Mistral's "consolidated" files, duplicate the weights.
        copied = snapshot_download(
            str(name), allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"]
        )
    except LocalEntryNotFoundError as error:
        raise FolderError(_advice(name, "no network access")) from error
    except Exception as error:  # from the file system or the Hub: unknown name, or access denied
        raise FolderError(_advice(name, " ".join(str(error).split()))) from error
    # Offline, the cache may contain only the files that an earlier call needed.
    for pattern in ("config.json", *(["*.safetensors"] if weights else [])):
        if not any(Path(copied).glob(pattern)):
            raise FolderError(_advice(name, f"no network access, or no {pattern} there"))
    return Path(copied)


def _advice(name: str | Path, reason: str) -> str:
    return (
        f"{name} is not a local folder, and cannot be downloaded from the Hugging Face Hub "
        f"({reason:.300}): with network access, run `hf download {name} --local-dir FOLDER`, and "
        "give FOLDER"
    )
