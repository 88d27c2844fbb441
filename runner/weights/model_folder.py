"""A model in a folder of Hugging Face's, or adapters of PEFT's with the folder of their base."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from lmlib.data.stored.metadata import tokenizers_differ
from lmlib.hf.families import Described, described
from lmlib.hf.family import Family
from lmlib.hf.folder import read_json
from lmlib.hf.load import load_weights
from lmlib.hf.peft import Adapters, adapters_in
from runner.config.references import HuggingFace, base_of
from runner.errors import user_errors
from runner.monitoring.transfer import told
from runner.processes.agreement import agreed
from runner.weights.texts import FILE, KnownTexts, tokenizer_of
from runner.weights.wanted import Keeping, Wanted


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A folder, of which nothing but the small files is read until its weights are asked for.

    Args:
      families: those that are known, of which its model is one.

    Its attributes and methods raise ValueError or OSError if it cannot be used.
    """

    found: HuggingFace
    families: Sequence[Family]

    step = cfg = None  # which runs have
    compute_dtype = "float32"

    @property
    def name(self) -> str:
        return self.found.name

    @functools.cached_property
    def base(self) -> HuggingFace:
        """The folder of the whole model: itself, unless it holds adapters."""
        return base_of(self.found)

    @functools.cached_property
    def described(self) -> Described:
        """The model of `base`."""
        return described(self.base.folder, self.families)

    @functools.cached_property
    def adapters(self) -> Adapters | None:
        return self.adapters_of(self.described.shapes)

    def adapters_of(self, shapes: Any) -> Adapters | None:
        """What it holds for a model without adapters, of which it gets shapes; `None` if none."""
        if self.base is self.found:
            return None
        return adapters_in(self.found.folder, shapes, self.described.family.names)

    @property
    def shapes(self) -> Any:
        """Of the model with its adapters."""
        shapes = self.described.shapes
        return shapes if self.adapters is None else self.adapters.beside(shapes)

    def abstract_model(self, mesh: Mesh) -> Any:
        return self.shapes

    @property
    def generation_settings(self) -> dict[str, Any]:
        """What generation_config.json of `base` says; empty without one."""
        file = self.base.folder / "generation_config.json"
        return read_json(file) if file.exists() else {}

    @property
    def texts(self) -> KnownTexts:
        """Adapters may come with a tokenizer of their own."""
        own, base = self.found, self.base
        texts = own if (own.folder / FILE).is_file() else base
        return KnownTexts(self.name, (texts.folder, texts.name), base.folder)

    def model(self, mesh: Mesh, show: Callable[[str], None]) -> Any:
        """The model in float32, laid out on `mesh` as it is stored."""
        names = self.described.family.names
        tell = told(f"reading {self.base.name}:", show)
        model = load_weights(self.base.folder, self.described.shapes, names, mesh, tell)
        return model if self.adapters is None else self.adapters.onto(model)

    def weights(self, wanted: Wanted, show: Callable[[str], None]) -> Any:
        """As `runner.weights.reading.weights_of`."""
        recipe = wanted.recipe
        with agreed(), user_errors():
            adapters = self.adapters_of(recipe.bare)
            if adapters is not None:
                wanted.check_adapters(adapters.beside(recipe.bare))
            wanted.check_model(self.described.shapes)
            problem = None
            if wanted.data is not None and tokenizers_differ(
                tokenizer_of(self.base.folder, self.base.name), wanted.data.tokenizer
            ):
                problem = f"the data was made by {wanted.data.tokenizer}"
            wanted.check_tokenizer(problem)
        names = self.described.family.names
        tell = told(f"reading {self.base.name}:", show)
        keeping = Keeping(recipe)
        arrays = load_weights(self.base.folder, recipe.bare, names, wanted.mesh, tell, keeping)
        keeping.tell(self.base.name, show)
        model = recipe.completed(arrays, wanted.mesh)
        return model if adapters is None else adapters.into(model)
