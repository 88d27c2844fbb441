"""Loads PEFT's folders into models with adapters."""

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from lmlib.hf.families import FAMILIES, family_of
from lmlib.hf.load import check_finite
from lmlib.hf.names import Piece, Placed, Share, check_complete
from lmlib.hf.peft.config import PeftConfig, means, read_config
from lmlib.hf.peft.modules import PREFIX, TENSORS, Module, modules_of, modules_of_experts, nested
from lmlib.hf.peft.whole import Whole, held
from lmlib.hf.tensor_files import Stored, read_header
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face.family import Family, Names
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.matrices.dora import DoRAMatrix, with_magnitude
from lmlib.models.matrices.lora import adapted, has_adapters, map_adapted
from lmlib.models.multi_token import without_heads
from lmlib.parallel.axes import M, Weight, map_weights
from lmlib.parallel.layout import storage_spec
from lmlib.parallel.mesh import on_mesh_of
from lmlib.parallel.selection import named_weights


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Adapters in a folder of PEFT's format; only headers have been read."""

    folder: Path
    config: PeftConfig
    modules: tuple[Module, ...]
    tensors: Mapping[str, Stored]
    sizes: Mapping[str, tuple[int, float]]  # rank and alpha of each adapter, by the weight's path
    whole: tuple[Whole, ...]  # the base's tensors that the folder contains too

    def beside(self, base: M) -> M:
        """Returns shapes of `base` with the adapters."""

        def adapt(weight: Weight, array: Any) -> Any:
            if weight.path not in self.sizes:
                return array
            rank, alpha = self.sizes[weight.path]
            stabilized, dropout = self.config.rank_stabilized, self.config.dropout
            one = adapted(weight, array, rank, alpha, stabilized, dropout, jax.random.key(0))
            return with_magnitude(one) if self.config.magnitude else one

        return jax.eval_shape(lambda base: map_weights(adapt, base), base)

    def arguments(self, base: Any) -> dict[str, Any]:
        """Returns arguments of `lmlib.adapters.lora` that make the same adapters.

        Raises FolderError if ranks or alphas differ between adapters.
        """
        if len(kinds := set(self.sizes.values())) > 1:
            raise FolderError(
                f"{self.folder}: its adapters have several ranks or alphas ({sorted(kinds)}); "
                "`lmlib.adapters.lora` gives one to all"
            )
        ((rank, alpha),) = kinds
        return {
            "rank": rank,
            "alpha": alpha,
            "paths": _patterns(self.sizes, named_weights(base)),
            "rank_stabilized": self.config.rank_stabilized,
            "dropout": self.config.dropout,
            **({"magnitude": True} if self.config.magnitude else {}),
        }

    def values(self, model: Any) -> dict[str, np.ndarray]:
        """Returns the folder's float32 values, by path in `model`; magnitudes instead of changes.

        `model` must have such adapters; its arrays may be shapes. Raises FolderError if the folder
        has different tables for the two uses of a tied table, or a base weight that is not
        floating-point in `model`.
        """
        tables = [self._read(each.name) for each in self.whole if each.holds(("embedding",))]
        if any(not np.array_equal(tables[0], other) for other in tables[1:]):
            raise FolderError(
                f"{self.folder} holds two tables, one that embeds and one that unembeds; in the "
                "base they are one"
            )
        shapes, found = dict[str, tuple[int, ...]](), dict[str, np.ndarray]()
        map_weights(lambda w, array: shapes.update({w.path: array.shape}), model)

        def put(path: str, piece: Piece, share: Share, tensor: np.ndarray) -> None:
            if path not in shapes:
                raise FolderError(
                    f"{self.folder} contains {path} itself, which is stored in 8 bits here: store "
                    'frozen weights as floats with frozen_dtype = "bfloat16", or train it'
                )
            if path not in found:
                found[path] = np.zeros(shapes[path], np.float32)
            found[path][piece.at] = share.cut(tensor)

        for module in self.modules:
            a, b = (self._read(name) for name in module.tensors)
            for place in module.places:
                piece = place.piece
                rank = self.sizes[piece.path][0]
                put(f"{piece.path}.down", piece, place.down(rank), a)
                put(f"{piece.path}.up", piece, place.up(rank), b)
                if self.config.magnitude:
                    m = self._read(module.magnitude)[:, None]
                    put(f"{piece.path}.magnitude_change", piece, place.up(1), m)
        for name, tensor in self.whole:
            for piece in tensor.pieces:
                path = f"{piece.path}.base" if piece.path in self.sizes else piece.path
                put(path, piece, piece.share, self._read(name))
        return found

    def besides(self, base: Any) -> tuple[str, ...]:
        """Returns path patterns of the base weights that the folder contains, without adapters."""
        paths = {piece.path for each in self.whole for piece in each.tensor.pieces}
        return _patterns(paths - self.sizes.keys(), named_weights(base))

    def _read(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        values = tensor.read(0, tensor.size).reshape(tensor.shape).astype(np.float32)
        check_finite(name, tensor, values)
        return values

    def onto(self, base: M) -> M:
        """Adds the adapters to `base`, in storage layout on its mesh."""
        arrays: dict[str, jax.Array] = {}
        map_weights(lambda weight, array: arrays.update({weight.path: array}), base)
        layout = next(iter(arrays.values())).sharding

        def placed(weight: Weight, shape: Any) -> Any:
            if (before := arrays.get(weight.path.removesuffix(".base"))) is not None:
                return before
            own = layout
            if isinstance(layout, NamedSharding):
                own = NamedSharding(layout.mesh, storage_spec(weight, shape.shape, layout.mesh))
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=own)

        return self.into(map_weights(placed, self.beside(base)))

    def into(self, model: M) -> M:
        """Returns `model`, which has such adapters, with the folder's values.

        Values take the layout and dtype of the arrays in `model`. Raises as `values`.
        """
        values = self.values(model)

        def fill(weight: Weight, place: Any) -> jax.Array:
            if weight.path not in values:
                return place
            value = values[weight.path].astype(place.dtype)
            return jax.make_array_from_callback(
                value.shape, place.sharding, lambda index: value[index]
            )

        filled = map_weights(fill, model)
        if not self.config.magnitude:
            return filled
        with on_mesh_of(filled):
            return map_adapted(lambda _, one: _relative(one), filled)


@jax.jit
def _relative(one: DoRAMatrix) -> DoRAMatrix:
    """Subtracts the norms of the base from magnitudes in the place of their changes."""
    return one.with_magnitude(one.magnitude_change)


def load_adapters(
    folder: str | Path,
    model: Decoder,
    *,
    model_type: str | None = None,
    families: Sequence[Family] = FAMILIES,
) -> Decoder:
    """Adds the adapters of a folder written by PEFT's `save_pretrained` to `model`, in float32.

    They are placed on the mesh of `model`. If a tensor of the base's folder contains several
    weights (Phi-3's qkv_proj, experts' gate_up_proj), each weight gets the whole lora_A, and its
    own rows of lora_B. Raises FolderError if the folder cannot be used, or is for another model,
    and ValueError if `model` has adapters already, or belongs to no family.

    Args:
      model: the base of the adapters.
      model_type, families: family of the base, as in `lmlib.hf.save`.
    """
    if has_adapters(model):
        raise ValueError("the model has adapters already: merge them first (`merged`)")
    family, _ = family_of(model, model_type, families)
    return adapters_in(Path(folder), model, family.names).onto(model)


def adapters_in(folder: Path, base: Any, names: Names) -> Adapters:
    """Reads a PEFT folder's adapters for `base`, whose arrays may be shapes.

    PEFT does not know heads of multi-token prediction, so these have none. Raises FolderError if
    the folder cannot be used, or is for another model.
    """
    base, config, tensors = without_heads(base), read_config(folder), _tensors(folder)
    every = [*modules_of(base, names).values(), *modules_of_experts(base, names).values()]
    modules = nested(
        module
        for module in every
        if _is_adapted(module, config, any(name in tensors for name in module.tensors))
    )
    for name in config.parameters:
        if not any(module.is_parameter and means(name, module.name) for module in every):
            raise FolderError(
                f"{folder}: target_parameters has {name!r:.200}, and the model has no such "
                "parameter of experts"
            )
    wanted = []
    for module in modules:
        shapes = zip(module.tensors, module.shapes(config.rank_of(module.name)), strict=True)
        wanted += [Placed(name, shape, ()) for name, shape in shapes]
        if config.magnitude:
            outputs, _ = module.shapes(1)[1]
            wanted.append(Placed(module.magnitude, (outputs,), ()))
            if module.is_parameter or any(place.piece.fixed for place in module.places):
                raise FolderError(
                    f"{folder}: use_dora = True is not supported for experts, such as {module.name}"
                )
    try:
        whole = held(base, names, {module.holder for module in modules}, config, tensors)
        wanted += [each.tensor._replace(name=each.name) for each in whole]
        _check_not_tied(base, names, tensors)
        check_complete(wanted, {name: each.shape for name, each in tensors.items()}, ())
        if not modules:
            raise ValueError(f"it adapts nothing: {TENSORS} is empty")
        sizes = _sizes(modules, config, base)
        pieces = (piece for each in whole for piece in each.tensor.pieces)
        _check_stacks(pieces, "a saved", base)
    except ValueError as error:
        raise FolderError(f"{folder}: {error}") from None
    return Adapters(folder, config, tuple(modules), tensors, sizes, tuple(whole))


def _check_not_tied(base: Any, names: Names, tensors: Iterable[str]) -> None:
    """Raises ValueError if one of `tensors` is an adapter of a tied table."""
    if base.unembedding is not None:
        return
    held = [names.tensor_of(path) for path in ("unembedding", "embedding")]
    tables = [names.modules.get(name, name).removesuffix(".weight") for name in held]
    for table, name in itertools.product(tables, sorted(tensors)):
        if name.startswith(f"{PREFIX}{table}.lora_"):
            raise ValueError(
                f"{name} adapts {table}, but {' and '.join(tables)} are one table in the base, and "
                "one of its uses cannot be adapted alone: give as base a folder that has both "
                "tensors, and tie_word_embeddings = false"
            )


def _is_adapted(module: Module, config: PeftConfig, has_tensors: bool) -> bool:
    if any(f".{name}." in f".{module.name}." for name in config.saved):
        return False
    if module.is_parameter:
        return any(means(name, module.name) for name in config.parameters)
    if config.targets is None:
        return has_tensors
    if not any(means(name, module.name) for name in config.targets):
        return False
    if config.excluded is None:
        return has_tensors
    return not any(means(name, module.name) for name in config.excluded)


def _sizes(
    modules: Iterable[Module], config: PeftConfig, base: Any
) -> dict[str, tuple[int, float]]:
    """Returns rank and alpha by weight; raises ValueError if layers of a stack differ."""
    found = dict[str, tuple[int, float]]()
    for module in modules:
        size = config.rank_of(module.name), config.alpha_of(module.name)
        for place in module.places:
            path = place.piece.path
            if found.setdefault(path, size) != size:
                raise ValueError(
                    f"rank and alpha are {size} in {module.name}, {found[path]} in a layer of the "
                    "same stack, where all must be alike"
                )

    _check_stacks(
        (place.piece for module in modules for place in module.places),
        "an adapter beside",
        base,
    )
    return found


def _check_stacks(pieces: Iterable[Piece], what: str, base: Any) -> None:
    """Raises ValueError if a weight has adapters in only some layers or some experts."""
    places = dict[str, list[Piece]]()
    for piece in pieces:
        places.setdefault(piece.path, []).append(piece)

    def check(weight: Weight, array: Any) -> None:
        found = places.get(weight.path, [])
        every = array.shape[0] if weight.stacked else 1
        for axis, _ in found[0].fixed if found else ():
            every *= array.shape[weight.stacked + axis]
        if 0 < len(found) < every:
            raise ValueError(
                f"{len(found)} of {every} layers have {what} {weight.path}: all layers of a stack "
                "and all experts must be alike"
            )

    map_weights(check, base)


def _tensors(folder: Path) -> dict[str, Stored]:
    if not (folder / TENSORS).is_file() and (folder / "adapter_model.bin").is_file():
        raise FolderError(
            f"{folder / 'adapter_model.bin'} is a pickle, which can run any code and is never "
            "read: convert the folder to safetensors first, with `save_pretrained` of peft"
        )
    return read_header(folder / TENSORS)


def _patterns(chosen: Iterable[str], every: Iterable[str]) -> tuple[str, ...]:
    """Returns patterns that match exactly these weights, such as "stack.*.attention.query"."""
    chosen, found = set(chosen), dict[str, None]()
    for path in every:
        if path in chosen:
            wide = "stack.*." + path.split(".", 4)[4] if path.startswith("stack.") else path
            found[wide if chosen >= set(fnmatch.filter(every, wide)) else path] = None
    return tuple(found)
