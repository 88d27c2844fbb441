"""Model references (runs, steps, folders, names on the Hub), and the known model families."""

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from lmlib.hf.families import FAMILIES
from lmlib.hf.folder import read_json
from lmlib.hf.hub import local_folder_of
from lmlib.hf.peft.config import holds_adapters, read_config
from lmlib.models.families.hugging_face.family import Family
from lmlib.storage.local_folder import folder_to_read
from lmlib.storage.unlinked import unlinked
from runner.errors import ConfigError, user_errors


class RunReference(NamedTuple):
    """The folder of a run's checkpoints; a `step` of `None` means the newest."""

    folder: Path
    step: int | None


class FolderReference(NamedTuple):
    """A Hugging Face folder; `name` is its path, or its name on the Hub."""

    folder: Path
    name: str


def resolve(reference: str) -> RunReference | FolderReference:
    """Finds `RUN`, `RUN@STEP`, a Hugging Face folder, or a Hub name, which is then downloaded.

    Raises ConfigError if the reference is none of these.
    """
    run, at, step = reference.rpartition("@")
    if not at or not step.isdecimal():
        run, step = reference, ""
    with user_errors():
        number = int(step) if step else None
        folder = folder_to_read(run)
        whole = folder if run == reference else folder_to_read(reference)
        if (folder / "checkpoints").is_dir():
            return RunReference(unlinked(folder, "checkpoints"), number)
        config = whole / "config.json"
        weights = any(whole.glob("*.safetensors"))
        if weights or (config.is_file() and "model_type" in read_json(config)):
            return FolderReference(whole, str(whole.absolute()))
        if folder.is_dir():
            return RunReference(folder, number)
        if (fetched := local_folder_of(reference)) != whole:
            return FolderReference(fetched, reference)
    raise ConfigError(
        f"{run} is not a folder; write RUN or RUN@STEP, a Hugging Face folder, or a Hub name "
        f"such as "
        "Qwen/Qwen3-0.6B"
    )


def base_of(found: FolderReference, base: str | None = None) -> FolderReference:
    """Returns the folder of the full model: `found` itself, or the base of its adapters.

    Raises ConfigError if no base is named, or its folder does not hold a full model.

    Args:
      base: a reference to use instead of the base that the adapters name.
    """
    if not holds_adapters(found.folder):
        return found
    reference = base or read_config(found.folder).base
    if reference is None:
        raise ConfigError(f"{found.name} names no base model: base_model_name_or_path is not set")
    try:
        folder = resolve(reference)
    except ConfigError as error:
        raise ConfigError(
            f"the model that the adapters of {found.name} are for: {error}; if it has moved, "
            "give runner.convert --base, or runner.generate and runner.evaluate --init_from"
        ) from error
    if not isinstance(folder, FolderReference) or holds_adapters(folder.folder):
        raise ConfigError(f"{reference} is not a base model for the adapters of {found.name}")
    return folder


def known_families(trusted: Collection[str]) -> tuple[Family, ...]:
    """Returns the `FAMILIES` of the modules `trusted`, then lmlib's.

    If two families have the same `model_type`, the first one is used. Raises ConfigError if a
    module cannot be imported, or its `FAMILIES` holds something else.
    """
    own = list[Family]()
    for name in trusted:
        flag = f"--trust_module={name}"
        try:
            found = getattr(importlib.import_module(name), "FAMILIES", ())
        except Exception as error:  # importing a module can raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"{flag} cannot be imported ({reason:.300}); if it is yours, set PYTHONPATH"
            ) from error
        if not isinstance(found, list | tuple) or not all(isinstance(f, Family) for f in found):
            raise ConfigError(
                f"{flag}: its FAMILIES is {found!r:.80}, and has to be a list of "
                "lmlib.models.families.hugging_face.family.Family"
            )
        own += found
    return (*own, *FAMILIES)
