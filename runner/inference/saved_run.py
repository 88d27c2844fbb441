"""A checkpoint of a run, and what its workdir knows besides: model, data, where it began."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import fiddle as fdl
from jax.sharding import Mesh

from lmlib.checkpoint import Checkpoints, RemovedCheckpointError
from lmlib.checkpoint.folders import steps_in
from lmlib.checkpoint.manifest import read_manifest
from lmlib.checkpoint.notes import read_notes
from lmlib.checkpoint.removal import reading
from lmlib.data.chats.chat import ChatTemplate
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import TokenizerIdentity, tokenizers_differ
from lmlib.hf.families import described
from lmlib.hf.folder import FolderError, read_json
from lmlib.hf.hub import TOKENIZER_FILES, local_folder_of
from lmlib.hf.peft import adapters_in, holds_adapters
from lmlib.models.matrices.adapted import without_adapters
from lmlib.parallel.selection import named_weights
from lmlib.recipe import Recipe, parted
from lmlib.state import abstract_model
from runner.config import configs
from runner.config.text import nodes
from runner.errors import ConfigError
from runner.processes.agreement import from_first
from runner.weights.reading import WEIGHTS_ALONE, recipe_of, weights_of
from runner.weights.references import HuggingFace, Saved, base_of, located, tokenizer_of

ORIGIN = "hugging_face"  # in an imported workdir: what its folder held besides weights

_TRIES = 3  # of reading the newest checkpoint of a run that goes on
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A checkpoint, of which nothing but its notes is read yet.

    Attributes:
      checkpoints: the folder that it lies in.
      cfg: the run's config.
      notes: what the run saved beside the arrays.
      trusted: modules that the config.json of a run may refer to.
      init_from: where what the run began with is now; `None`: where it was.
    """

    checkpoints: Path
    step: int
    cfg: fdl.Config
    notes: dict[str, Any]
    trusted: Collection[str] = ()
    init_from: str | None = None

    @property
    def workdir(self) -> Path:
        return self.checkpoints.parent

    @property
    def folder(self) -> Path:
        """The checkpoint's own."""
        return self.checkpoints / str(self.step)

    def abstract_model(self, mesh: Mesh) -> Any:
        """The model's shapes, dtypes and layouts on `mesh`."""
        return abstract_model(lambda: self.recipe.made, mesh)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """How the run makes and keeps its weights."""
        return recipe_of(self.cfg)

    def model(self, mesh: Mesh) -> Any:
        """The model as it is stored on `mesh`, what is frozen from where the run had it; nothing
        else of the checkpoint is read.

        Raises:
          ConfigError: if a byte of it is not as it was saved, or the frozen weights are gone.
          RemovedCheckpointError: if the run has removed it since.
        """
        reference = f"{self.checkpoints}@{self.step}"
        with reading(self.folder):
            return weights_of(
                reference, self.recipe, mesh, None, trusted=self.trusted, init_from=self.init_from
            )[0]

    def own_weights(self, mesh: Mesh) -> Any:
        """As `model`, with shapes in place of what is frozen, which is not looked for."""
        parts = parted(abstract_model(lambda: self.recipe.shapes, mesh), self.recipe.trained)
        with reading(self.folder), Checkpoints(self.checkpoints, read_only=True) as checkpoints:
            arrays, _ = checkpoints.restore_part(self.step, "model", parts.trained)
        return eqx.combine(arrays, parts.frozen)

    @functools.cached_property
    def origin(self) -> Path | None:
        """The folder of Hugging Face's that the run began with, or what an imported workdir kept of
        it; `None` if it did not begin so, or that is gone."""
        for workdir, _, _ in self._beginnings():
            if (workdir / ORIGIN).is_dir():
                return workdir / ORIGIN
        if self.began_with is None:
            return None
        with contextlib.suppress(FolderError):
            return local_folder_of(self.began_with, weights=False)
        return None

    @functools.cached_property
    def began_with(self) -> str | None:
        """The folder of Hugging Face's, or the name, of a whole model that the run began with, or
        the run that it began with, and so on; `None` if it did not begin so."""
        *_, (_, before, _) = self._beginnings()
        if before is None or before.rpartition("@")[2].isdecimal():
            return None
        with contextlib.suppress(ValueError, OSError):
            return base_of(HuggingFace(Path(before), before)).name
        return before

    @functools.cached_property
    def trained(self) -> list[frozenset[str]]:
        """The paths, in the model without adapters, of the weights that this run trained; of those
        that the run changed which it began with; and so on, back to `began_with`."""
        base, adapted = without_adapters(self.recipe.shapes), set(named_weights(self.recipe.shapes))
        every, same_adapters = frozenset(named_weights(base)), True
        found: list[frozenset[str]] = []
        for _, before, there in self._beginnings():
            merged = {path.removesuffix(".down") for path in there - every}
            same_adapters &= not found or (bool(merged) and there <= adapted)
            found.append(every & (there if same_adapters else there | merged))
            folder = Path(before or "")
            if before is not None and holds_adapters(folder):
                names = described(base_of(HuggingFace(folder, before)).folder).family.names
                held = adapters_in(folder, base, names)
                whole = frozenset(p.path for each in held.whole for p in each.tensor.pieces)
                found.append(whole if same_adapters else whole | held.sizes.keys())
        return found

    def _beginnings(self) -> Iterator[tuple[Path, str | None, frozenset[str]]]:
        """The workdir of this run, what it began with, and the paths of what it trained; the same
        of the run that this was, and so on."""
        workdir, notes, saved = self.workdir, self.notes, self.folder
        for _ in range(20):
            noted = notes.get("initialised_from")
            before = noted if isinstance(noted, str) else None
            yield workdir, before, _trained(saved, notes)
            folder, _, step = (before or "").rpartition("@")
            if not step.isdecimal():
                return
            workdir, saved = Path(folder).parent, Path(folder, step)
            notes = _notes(saved) if saved.is_dir() else {}

    @functools.cached_property
    def data(self) -> FlatTokens | None:
        """What the run was trained on, or a part of it, if it is flat tokens that are still there
        or can be made again."""
        return next(self._flat_tokens(), None)

    def chat_template(self) -> ChatTemplate | None:
        """What made the texts of the conversations that the run was trained on; `None` if they are
        gone, or there were none.

        Raises:
          ValueError, OSError: if it is damaged.
        """
        templates = (data.chat_template() for data in self._flat_tokens())
        return next((each for each in templates if each is not None), None)

    def _flat_tokens(self) -> Iterator[FlatTokens]:
        """Of its data those that are there, or can be made again."""
        for node in nodes(self.cfg.data):
            if fdl.get_callable(node) is FlatTokens:
                with contextlib.suppress(ValueError, OSError):
                    yield fdl.build(node)

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        """What made the ids that the model knows."""
        if self.data is not None and self.step > WEIGHTS_ALONE:
            return self.data.tokenizer
        return self._noted_tokenizer or (None if self.origin is None else _identity(self.origin))

    def check_tokenizer(self) -> None:
        """Raises ConfigError if the run's data is not of the ids any more that it trained on."""
        if self.data is None or self.step == WEIGHTS_ALONE:
            return
        before, now = self._noted_tokenizer, self.data.tokenizer
        if tokenizers_differ(before, now):
            raise ConfigError(
                f"{self.workdir} was trained on ids of the tokenizer {before}, and its data is of "
                f"{now}: it was made again, perhaps by another version of Python; give "
                "--tokenizer, or the data that the run had"
            )

    @property
    def _noted_tokenizer(self) -> TokenizerIdentity | None:
        """As the checkpoint's notes tell it."""
        noted = self.notes.get("batches")
        known = noted.get("tokenizer") if isinstance(noted, dict) else None
        if isinstance(known, dict):
            with contextlib.suppress(TypeError):
                return TokenizerIdentity(**known)
        return None

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder that the run began with, if it has a tokenizer's files, unless the run is
        known to have been trained on another's ids."""
        origin = self.origin
        if origin is None or not any((origin / name).is_file() for name in TOKENIZER_FILES):
            return None
        trained_on = self.data.tokenizer if self.data is not None else self.tokenizer
        return None if tokenizers_differ(_identity(origin), trained_on) else origin

    @property
    def origin_config(self) -> dict[str, Any]:
        """config.json of the folder that the run began with; empty if there is none."""
        file = None if self.origin is None else self.origin / "config.json"
        return read_json(file) if file is not None and file.is_file() else {}

    @property
    def longest(self) -> int | None:
        """Tokens in the longest sequence that the model was trained on, if it is known."""
        lengths = [longest_in(self.origin_config)]
        if self.step > WEIGHTS_ALONE:
            lengths.append(getattr(self.cfg.data, "sequence_length", None))
        return max((length for length in lengths if isinstance(length, int)), default=None)


def _trained(saved: Path, notes: Mapping[str, Any]) -> frozenset[str]:
    """The paths of the weights in a checkpoint, but for those of a whole model that was brought in,
    which nothing has trained yet."""
    if not saved.is_dir() or (saved.name == str(WEIGHTS_ALONE) and notes.get("frozen") is None):
        return frozenset()
    with reading(saved):
        names = read_manifest(saved).arrays
    return frozenset(name.removeprefix("model.") for name in names if name.startswith("model."))


def longest_in(config: dict[str, Any]) -> int | None:
    """Tokens in the longest sequence that a config.json says its model takes, if it does."""
    known = (config.get(name) for name in ("max_position_embeddings", "n_positions"))
    return next((length for length in known if isinstance(length, int)), None)


def use_run(
    found: Saved,
    use: Callable[[SavedRun], _T],
    trusted: Collection[str] = (),
    init_from: str | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> _T:
    """What `use` makes of the checkpoint that `found` names, the newest unless it says which. If
    its run removes the newest meanwhile, that of the one that is newest then.

    Args:
      trusted: modules that the run's config.json may refer to.
      init_from: where what the run began with is now; `None`: where it was.
      show: gets a line about what is not as it was asked for.

    Raises:
      ValueError, OSError: if there is no such checkpoint, or its config or notes are damaged.
      RemovedCheckpointError: if it was named, or a run removes one after the other.
    """
    tries = _TRIES if found.step is None else 1
    while True:
        tries -= 1
        try:
            run = _opened(found, trusted, init_from)
            if init_from is not None and run.init_from is None:
                show(f"--init_from={init_from} is ignored: {run.folder} holds the whole model")
            return use(run)
        except RemovedCheckpointError as error:
            if not tries:
                raise
            show(f"{error}; going on with the newest there is now")


def _opened(found: Saved, trusted: Collection[str], init_from: str | None) -> SavedRun:
    steps = from_first(steps_in(found.folder))  # a run that goes on may just add one
    if not steps:
        raise ConfigError(f"{found.folder} holds no checkpoint")
    step = steps[-1] if found.step is None else found.step
    if step not in steps:
        raise ConfigError(f"{found.folder} has no checkpoint at step {step}; it has {steps}")
    cfg = configs.load(str(found.folder.parent / "config.json"), trusted=trusted)
    notes = _notes(found.folder / str(step))
    if notes.get("frozen") is None:
        init_from = None
    if init_from is not None:
        notes["initialised_from"] = _noted(init_from)
    return SavedRun(found.folder, step, cfg, notes, trusted, init_from)


def _notes(saved: Path) -> dict[str, Any]:
    """Those of a checkpoint, which was there before."""
    with reading(saved):
        return read_notes(saved, read_manifest(saved))


def _noted(reference: str) -> str:
    """A reference as notes have it."""
    found = located(reference)
    if isinstance(found, HuggingFace):
        return found.name
    step = max(steps_in(found.folder), default=None) if found.step is None else found.step
    return f"{found.folder.absolute()}@{step}"


def _identity(folder: Path) -> TokenizerIdentity | None:
    return tokenizer_of(HuggingFace(folder, str(folder)))
