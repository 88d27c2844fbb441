"""GGUF files for `runner.convert`: a saved model becomes one, or one becomes a folder for a while.

The package `gguf` is optional, so lmlib.gguf is imported only here, when it is needed.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmlib.data.chats.chat import read_chat_template
from lmlib.models.families.hugging_face.family import Family
from lmlib.storage.atomic_file import UNFINISHED, make_folder, sync
from runner.command_line.paths import check_can_be_made
from runner.config.references import FolderReference
from runner.errors import ConfigError
from runner.monitoring.progress_line import told
from runner.weights.texts import FILE, TextSources

_MISSING = "GGUF needs the package gguf: pip install 'lmlib[gguf]'"


def is_gguf(reference: str) -> bool:
    return reference.endswith(".gguf")


@contextlib.contextmanager
def as_folder(reference: str, to: Path, show: Callable[[str], None]) -> Iterator[FolderReference]:
    """Yields a Hugging Face folder with the model of a GGUF file, beside `to`; it is removed then.

    Raises ConfigError without the package `gguf`, and FolderError if the file cannot be used.
    """
    try:
        from lmlib.gguf import to_folder
    except ModuleNotFoundError as error:
        raise ConfigError(_MISSING) from error
    check_can_be_made(to)
    parent = to.absolute().parent
    make_folder(parent)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=parent) as folder:
        file = Path(os.path.expanduser(reference))
        to_folder(file, folder, told(f"reading {reference}:", show))
        yield FolderReference(Path(folder), str(file.absolute()))


def write_gguf(
    model: Any,
    to: Path,
    texts: TextSources,
    tokenizer: Path | None,
    kind: str,
    settings: Mapping[str, Any],
    families: Sequence[Family],
    show: Callable[[str], None],
) -> Path | None:
    """Writes a model as the GGUF file `to`, whole or not at all; returns its tokenizer.json.

    Raises ConfigError if `to` exists or the package `gguf` is missing, and ValueError as
    `lmlib.gguf.save`.

    Args:
      tokenizer: a tokenizer.json or its folder; `None`: the one of `texts`, if there is one.
    """
    try:
        from lmlib.gguf import save
    except ModuleNotFoundError as error:
        raise ConfigError(_MISSING) from error
    check_can_be_made(to)
    if to.exists():
        raise ConfigError(f"--to={to} exists: give a new file")
    template = None
    if tokenizer is None:
        texts.check_tokenizer()
        template, tokenizer = texts.template_of_data(), texts.tokenizer_folder
        if tokenizer is None and texts.first is not None:
            tokenizer = texts.first.tokenizer_path
    own = tokenizer / FILE if tokenizer is not None and tokenizer.is_dir() else tokenizer
    if own is not None and template is None:
        template = read_chat_template(own.parent)
    make_folder(to.absolute().parent)
    unfinished = to.with_name(f".{to.name}{UNFINISHED}")
    unfinished.unlink(missing_ok=True)  # left by a killed process
    save(
        model,
        unfinished,
        kind=kind,
        tokenizer=None if own is None else own.read_text(encoding="utf-8"),
        chat_templates=None if template is None else template.sources,
        longest=texts.longest,
        settings=settings,
        families=families,
        progress=told("writing", show),
    )
    sync(unfinished)
    os.replace(unfinished, to)
    sync(to.absolute().parent)
    return own
