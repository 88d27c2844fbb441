"""Models in Hugging Face folders, and PEFT adapters with the folder of their base model."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import xxhash
from jax.sharding import Mesh

from lmlib.data.stored.metadata import tokenizers_differ
from lmlib.hf.families import Described, described
from lmlib.hf.folder import opened, read_copied, read_json
from lmlib.hf.hub import SETTINGS, TOKENIZER_FILES
from lmlib.hf.load import load_weights
from lmlib.hf.peft.load import Adapters, adapters_in
from lmlib.parallel.axes import Weight
from lmlib.storage.atomic_file import make_folder
from runner.config.references import FolderReference, base_of
from runner.errors import user_errors
from runner.monitoring.progress_line import told
from runner.processes.agreement import Read, agreed
from runner.weights.target import PLAIN, LoadOptions, LoadTarget, without_extra_heads
from runner.weights.texts import FILE, TextSources, tokenizer_of

ORIGIN = "hugging_face"  # folder in an imported workdir: the source folder's files without weights
_CONFIGS = ("config.json", "adapter_config.json")
_SAMPLES, _SAMPLE_BYTES = 64, 4_096  # number and size of the samples from each file of tensors


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face or PEFT folder. Only small files are read until the weights are needed.

    Its attributes and methods raise ValueError or OSError if it cannot be used.
    """

    found: FolderReference
    options: LoadOptions = PLAIN

    step = cfg = workdir = None  # only runs have them
    compute_dtype = "float32"

    @property
    def name(self) -> str:
        return self.found.name

    @functools.cached_property
    def base(self) -> FolderReference:
        """The folder of the full model: the adapters' base, or this folder itself."""
        return base_of(self.found, self.options.init_from)

    @functools.cached_property
    def described(self) -> Described:
        """The model in the folder `base`."""
        return described(self.base.folder, self.options.families)

    @functools.cached_property
    def adapters(self) -> Adapters | None:
        return self.adapters_of(self.described.shapes)

    def adapters_of(self, shapes: Any) -> Adapters | None:
        """Returns the folder's adapters, or `None`. `shapes` is the model without adapters."""
        if self.base is self.found:
            return None
        return adapters_in(self.found.folder, shapes, self.described.family.names)

    @property
    def shapes(self) -> Any:
        """The shapes of the model with its adapters."""
        shapes = self.described.shapes
        return shapes if self.adapters is None else self.adapters.beside(shapes)

    def abstract_model(self, mesh: Mesh) -> Any:
        return self.shapes

    @property
    def generation_settings(self) -> dict[str, Any]:
        """The content of generation_config.json in `base`; empty if there is none."""
        file = self.base.folder / "generation_config.json"
        return read_json(file) if file.exists() else {}

    @property
    def texts(self) -> TextSources:
        """The sources of the tokenizer and template; adapters may bring their own tokenizer."""
        texts = self.found if (self.found.folder / FILE).is_file() else self.base
        return TextSources(self.name, (texts.folder, texts.name), self.base.folder)

    @property
    def content(self) -> Read:
        """Digests of the configs, and of samples of the tensors."""
        folders = [each.folder for each in dict.fromkeys((self.found, self.base))]
        return Read([_digest(each) for each in folders], [str(each.absolute()) for each in folders])

    def model(self, mesh: Mesh, exact: bool = True) -> Any:
        """Returns the model in float32, laid out on `mesh` as it is stored."""
        model = self._read(self.described.shapes, mesh)
        return model if self.adapters is None else self.adapters.onto(model)

    def fill(self, target: LoadTarget) -> tuple[Any, str]:
        """Reads the weights into `target`; see `SavedRun.fill`."""
        recipe = target.recipe
        with agreed(), user_errors():
            adapters = self.adapters_of(recipe.bare)
            if adapters is not None:
                target.check_adapters(adapters.beside(recipe.bare))
            target.check_model(self.described.shapes)
            if target.data is not None:
                own = tokenizer_of(self.base.folder, self.base.name)
                if tokenizers_differ(own, target.data.tokenizer):
                    target.check_tokenizer(f"the data was made by {target.data.tokenizer}")
        shapes = without_extra_heads(recipe.bare, self.described.shapes)
        arrays = self._read(shapes, target.mesh, recipe.kept)
        model = recipe.completed(arrays, target.mesh)
        return (model if adapters is None else adapters.into(model)), self.name

    def _read(self, shapes: Any, mesh: Mesh, *kept: Callable[[Weight, jax.Array], Any]) -> Any:
        names = self.described.family.names
        progress = told(f"reading {self.base.name}:", self.options.show)
        return load_weights(self.base.folder, shapes, names, mesh, progress, *kept)


def keep_origin(folder: Path, workdir: Path) -> None:
    """Copies a Hugging Face folder's settings and tokenizer into `workdir`."""
    make_folder(workdir / ORIGIN)
    for name, content in read_copied(folder, (*SETTINGS, *TOKENIZER_FILES)).items():
        (workdir / ORIGIN / name).write_bytes(content)


def _digest(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(folder.iterdir()):
        if path.suffix != ".safetensors" and path.name not in _CONFIGS:
            continue
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size}\n".encode())
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
