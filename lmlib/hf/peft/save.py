"""Saves adapters to folders that PEFT's `from_pretrained` loads."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from lmlib.hf.families import FAMILIES, family_of
from lmlib.hf.names import Placed, concatenate_shares
from lmlib.hf.peft.config import FILE, PeftConfig
from lmlib.hf.peft.modules import TENSORS, Module, modules_of, nested
from lmlib.hf.peft.whole import Kept, kept
from lmlib.hf.save import NAMES_OF_DTYPES, meet, move_up, out_of_range, require_new
from lmlib.hf.tensor_files import begin_files, laid_out, write
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.matrices.dora import DoRAMatrix
from lmlib.models.matrices.lora import LoRAMatrix, map_adapted, without_adapters
from lmlib.models.multi_token import without_heads
from lmlib.parallel.axes import M
from lmlib.parallel.matrix import dense, is_matrix
from lmlib.parallel.mesh import on_mesh_of
from lmlib.parallel.selection import named_weights, selected
from lmlib.storage.atomic_file import UNFINISHED, sync, write_atomically

V = TypeVar("V")


def save_adapters(
    model: Any,
    folder: str | Path,
    *,
    base: str | None = None,
    trained: Sequence[str],
    model_type: str | None = None,
    dtype: str = "float32",
    families: Sequence[Family] = FAMILIES,
) -> None:
    """Writes the adapters of `model` in PEFT's format.

    The files are adapter_config.json and adapter_model.safetensors. With several processes, each
    must call this, and all must see the folder.

    PEFT takes all other weights from the base, without heads of multi-token prediction. If anything
    other than the adapters was trained, it has to be in `trained`, or PEFT loads another model. A
    model does not record this, so `trained` has no default.

    If a tensor of the base's folder contains several weights (Phi-3's qkv_proj, experts'
    gate_up_proj), its rank is the sum of the ranks of their adapters, each with its own rows and
    columns. Raises ValueError if the model belongs to no family, or PEFT does not support such
    adapters, and FileExistsError if the folder is not empty.

    Args:
      folder: new, or empty.
      base: the model without adapters for PEFT's users: a folder, or a name on the Hub.
      trained: path patterns, in the model without adapters, of weights that differ from the base:
        ("*norm.scale", "embedding"). () if only the adapters were trained. These weights are
        written in full (`lmlib.hf.peft.whole`).
      model_type, families: family of the base, as in `lmlib.hf.save`.
      dtype: dtype of the file, "bfloat16", "float16" or "float32".
    """
    folder = Path(folder)
    if dtype not in NAMES_OF_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(NAMES_OF_DTYPES)}, got {dtype!r}")
    require_new(folder)
    modules, adapters, whole = _held(model, trained, model_type, families)
    config, tensors = _told(modules, adapters, base, whole), dict[str, np.ndarray]()
    values = {path: (_whole(one.down), _whole(one.up)) for path, one in adapters.items()}
    of_dora = adapters.items() if config.magnitude else ()
    with on_mesh_of(model):
        magnitudes = {path: _whole(_magnitude(one)) for path, one in of_dora}
    for module in nested(_with_adapters(modules, adapters)):
        tensors |= zip(module.tensors, _joined(module, values), strict=True)
        if config.magnitude:
            tensors[module.magnitude] = _magnitudes(module, magnitudes)
    given = _values(model, _paths(whole))
    dtypes = {name: tensor.dtype_in(dtype) for name, tensor in whole.tensors}
    tensors |= {name: _laid(tensor, given) for name, tensor in whole.tensors}
    tensors = {
        name: _in_dtype(name, each, dtypes.get(name, dtype)) for name, each in tensors.items()
    }
    if jax.process_index() == 0:
        unfinished = folder / UNFINISHED
        unfinished.mkdir(parents=True)
        shaped = {name: (each.dtype, each.shape) for name, each in tensors.items()}
        files = laid_out(unfinished, shaped, 1 << 62, TENSORS)
        begin_files(files)
        for name, target in files.items():
            write(target, 0, tensors[name])
        sync(unfinished / TENSORS)
        move_up(unfinished)
        transposed = any(
            not module.looks_up and not module.is_parameter and place.inputs == 0
            for module in modules.values() for place in module.places
        )  # fmt: skip
        write_atomically(folder / FILE, json.dumps(config.content(transposed), indent=2) + "\n")
    meet("lmlib: adapters written")


def written_whole(
    model: Any,
    trained: Sequence[str],
    model_type: str | None = None,
    families: Sequence[Family] = FAMILIES,
) -> set[str]:
    """Returns the paths of all weights, other than adapters, that `save_adapters` writes.

    `save_adapters` reads no other weights. Paths are in the model without adapters, whose arrays
    may be shapes. Arguments and errors are those of `save_adapters`.
    """
    _, adapters, whole = _held(model, trained, model_type, families)
    return _paths(whole) | {p for p, one in adapters.items() if isinstance(one, DoRAMatrix)}


def _held(
    model: Any, trained: Sequence[str], model_type: str | None, families: Sequence[Family]
) -> tuple[dict[str, Module], dict[str, LoRAMatrix], Kept]:
    """Returns the modules, the adapters by path, and the tensors that are written in full."""
    shapes, adapters = shapes_of_base(model), dict[str, LoRAMatrix]()
    map_adapted(lambda path, one: adapters.update({path: one}), model)
    if not adapters:
        raise ValueError("the model has no adapters: `lmlib.hf.save` writes it")
    family, _ = family_of(shapes, model_type, families)
    changed = selected(named_weights(shapes), trained, ())
    for path in (*adapters, *changed):
        if path.startswith("predictors."):
            raise ValueError(
                f"PEFT's format has no place for heads of multi-token prediction, and {path} was "
                "trained: write the model with its adapters merged"
            )
    shapes = without_heads(shapes)
    modules = modules_of(shapes, family.names)
    adapted = {module.holder for module in _with_adapters(modules, adapters)}
    return modules, adapters, kept(shapes, family.names, adapted, changed)


def _paths(whole: Kept) -> set[str]:
    return {piece.path for each in whole.tensors for piece in each.tensor.pieces}


def shapes_of_base(model: M) -> M:
    """Returns shapes of `model` without adapters and without 8-bit storage."""
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, jnp.float32),
        without_adapters(model),
        is_leaf=is_matrix,
    )


def _with_adapters(modules: Mapping[str, Module], adapters: Collection[str]) -> Iterator[Module]:
    """Yields the modules with a weight in `adapters`."""
    for module in modules.values():
        if any(place.piece.path in adapters for place in module.places):
            yield module


def _values(model: Any, paths: Collection[str]) -> dict[str, np.ndarray]:
    """Returns float32 values of the weights at `paths` of the model without adapters."""
    base, found = without_adapters(model), dict[str, np.ndarray]()

    def note(keys: Any, array: Any) -> None:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        if path in paths:
            found[path] = _whole(dense(array))

    jax.tree_util.tree_map_with_path(note, base, is_leaf=is_matrix)
    return found


def _laid(tensor: Placed, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Assembles the folder's tensor from `values`."""
    own = [values[piece.path][piece.at] for piece in tensor.pieces]
    return concatenate_shares([piece.share for piece in tensor.pieces], own)


def _told(
    modules: Mapping[str, Module], adapters: Mapping[str, LoRAMatrix], base: str | None, whole: Kept
) -> PeftConfig:
    """Returns the config of a model's adapters."""
    held = {place.piece.path for module in modules.values() for place in module.places}
    if lost := sorted(set(adapters) - held):
        tied = " (PEFT adapts only the embedding of a tied table)" if "embedding" in lost else ""
        raise ValueError(f"PEFT's format has no place for the adapters of {', '.join(lost)}{tied}")
    kinds = {
        (one.rank_stabilized, one.dropout, isinstance(one, DoRAMatrix)) for one in adapters.values()
    }
    if len(kinds) > 1:
        raise ValueError(
            f"PEFT's format has one use_rslora, lora_dropout and use_dora for all adapters, here "
            f"they are {sorted(kinds)}"
        )
    ((stabilized, dropout, magnitude),) = kinds
    found: dict[str, tuple[int, float]] = {}
    for name, module in modules.items():
        own = [adapters[p.piece.path] for p in module.places if p.piece.path in adapters]
        if len({one.scale for one in own}) > 1:
            raise ValueError(
                f"the adapters in {name} have several scales, which PEFT does not support"
            )
        if own:
            rank = sum(one.rank for one in own)
            more = rank / own[0].rank
            found[name] = rank, own[0].alpha * (math.sqrt(more) if stabilized else more)
    parameters = {name: found.pop(name) for name in [*found] if modules[name].is_parameter}
    targets, of_experts = _named(found, modules), _named(parameters, modules)
    named = targets | of_experts
    rank, alpha = Counter([*found.values(), *parameters.values()]).most_common(1)[0][0]
    return PeftConfig(
        rank,
        alpha,
        stabilized,
        dropout,
        magnitude,
        base,
        targets=tuple(targets),
        parameters=tuple(of_experts),
        ranks={name: own for name, (own, _) in named.items() if own != rank},
        alphas={name: own for name, (_, own) in named.items() if own != alpha},
        saved=whole.modules,
        biases=whole.biases,
        tied=whole.tied,
    )


def _named(values: Mapping[str, V], modules: Mapping[str, Module]) -> dict[str, V]:
    """Shortens names to suffixes ("q_proj") if all modules with that suffix have the same value."""
    ends: dict[str, set[V | None]] = {}
    for name, module in modules.items():
        ends.setdefault(module.end, set()).add(values.get(name))
    short = {name: modules[name].end for name in values}
    return {end if len(ends[end]) == 1 else name: values[name] for name, end in short.items()}


def _joined(
    module: Module, values: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Assembles lora_A and lora_B of a module.

    Rows of A are concatenated over weights, expert by expert. B is zero in rows and columns that
    belong to different weights.
    """
    own = {
        place: [each[place.piece.at] for each in values[place.piece.path]]
        for place in module.places if place.piece.path in values
    }  # fmt: skip
    ranks = {place: up.shape[len(place.apart)] for place, (_, up) in own.items()}
    rank, rows, blocks, column = sum(ranks.values()), [], [], 0
    for place in module.places:
        block = np.zeros(place.up(rank).sizes, np.float32)
        if place in own:
            down, up = own[place]
            lying = place.down(ranks[place]).joined(down)
            rows.append(lying.reshape(place.experts, ranks[place], -1))
            columns = slice(column, column + ranks[place])
            block[(*[slice(None)] * len(place.apart), columns)] = up
            column += ranks[place]
        blocks.append(block)
    a = np.concatenate(rows, axis=1)
    b = concatenate_shares([place.up(rank) for place in module.places], blocks)
    return a.reshape(-1, a.shape[-1]), b


def _magnitudes(module: Module, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Assembles the magnitudes [outputs] of a module."""
    if lost := [p.piece.path for p in module.places if p.piece.path not in values]:
        raise ValueError(
            f"PEFT's use_dora = True needs magnitudes of the whole {module.name}: adapt "
            f"{' and '.join(lost)} too"
        )
    pieces = [place.piece for place in module.places]
    own = [values[piece.path][piece.at] for piece in pieces]
    return concatenate_shares([place.up(1) for place in module.places], own)[:, 0]


_magnitude = jax.jit(DoRAMatrix.magnitude)


def _in_dtype(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """Converts `values` of the tensor `name` to `dtype`; raises ValueError beyond its range."""
    with np.errstate(over="ignore"):
        rounded = values.astype(jnp.dtype(dtype))
    lost = values[np.isfinite(values) & ~np.isfinite(rounded)]
    if lost.size:
        raise out_of_range(name, float(lost[np.argmax(np.abs(lost))]), dtype)
    return rounded


def _whole(array: jax.Array) -> np.ndarray:
    """Returns the array's values in every process."""
    if not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array, np.float32)
