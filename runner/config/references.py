"""What weights are called: a run, a folder of Hugging Face's or PEFT's, or a name on the Hub."""

import dataclasses
from pathlib import Path

from lmlib.hf.folder import read_json
from lmlib.hf.hub import local_folder_of
from lmlib.hf.peft.config import holds_adapters, read_config
from lmlib.storage.local_folder import folder_to_read
from lmlib.storage.unlinked import unlinked
from runner.errors import ConfigError, user_errors


@dataclasses.dataclass(frozen=True)
class Saved:
    """The checkpoints of a run in `folder`; `step` is `None` for the newest."""

    folder: Path
    step: int | None


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A folder of Hugging Face's; `name` is its path, or its name on the Hub.

    base: of a folder of adapters, the reference of the model without them; `None`: as it says.
    """

    folder: Path
    name: str
    base: str | None = None


def located(reference: str) -> Saved | HuggingFace:
    """What `reference` means: `RUN`, `RUN@STEP`, a folder of Hugging Face's or its name on the Hub,
    from where it is then fetched.

    Raises:
      ConfigError: if it is none of them.
    """
    run, at, step = reference.rpartition("@")
    if not at or not step.isdecimal():
        run, step = reference, ""
    with user_errors():
        number = int(step) if step else None
        folder = folder_to_read(run)
        whole = folder if run == reference else folder_to_read(reference)
        if (folder / "checkpoints").is_dir():
            return Saved(unlinked(folder, "checkpoints"), number)
        if is_hugging_face(whole):
            return HuggingFace(whole, str(whole.absolute()))
        if folder.is_dir():
            return Saved(folder, number)
        if (fetched := local_folder_of(reference)) != whole:
            return HuggingFace(fetched, reference)
    raise ConfigError(
        f"{run} is no folder; write RUN or RUN@STEP, a folder of Hugging Face's, or a name on the "
        "Hub, as Qwen/Qwen3-0.6B"
    )


def is_hugging_face(folder: Path) -> bool:
    """Whether it holds safetensors, or a config.json of a model's; raises FolderError if that is
    damaged."""
    config = folder / "config.json"
    return any(folder.glob("*.safetensors")) or (
        config.is_file() and "model_type" in read_json(config)
    )


def base_of(found: HuggingFace) -> HuggingFace:
    """The folder whose model the adapters in `found` are for; `found`, if it holds a whole model.

    Raises:
      ConfigError: if it does not say, or that is no folder of a whole model.
    """
    if not holds_adapters(found.folder):
        return found
    reference = found.base or read_config(found.folder).base
    if reference is None:
        raise ConfigError(
            f"{found.name} does not say for which model its adapters are: base_model_name_or_path "
            "is not set"
        )
    try:
        base = located(reference)
    except ConfigError as error:
        raise ConfigError(
            f"the model that the adapters of {found.name} are for: {error}; if it has moved, "
            "give runner.convert --base, or runner.generate and runner.evaluate --init_from"
        ) from error
    if not isinstance(base, HuggingFace) or holds_adapters(base.folder):
        raise ConfigError(
            f"{reference} holds no model of Hugging Face's for the adapters of {found.name}"
        )
    return base
