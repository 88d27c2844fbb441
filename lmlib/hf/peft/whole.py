"""Weights that an adapter folder contains in full: `modules_to_save`, and biases.

The biases belong to adapted modules. PEFT saves modules, not tensors: a norm with its bias, a
matrix with its bias. A name in `modules_to_save` means every module whose name ends with it, and
everything in it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from lmlib.hf.names import Placed
from lmlib.hf.peft.config import PeftConfig
from lmlib.hf.peft.modules import PREFIX, tensors_in_class
from lmlib.models.families.hugging_face.family import Names


class Whole(NamedTuple):
    """A tensor of the base: its name in an adapter folder, and its content."""

    name: str
    tensor: Placed

    @property
    def module(self) -> str:
        return self.tensor.name.rpartition(".")[0]

    @property
    def is_bias(self) -> bool:
        return self.tensor.name.endswith(".bias")

    def holds(self, paths: Collection[str]) -> bool:
        """True if the tensor contains one of the weights at `paths`."""
        return any(piece.path in paths for piece in self.tensor.pieces)


def tensors_of(base: Any, names: Names, adapted: Collection[str]) -> list[Whole]:
    """Returns every tensor of `base`, with `adapted` the names of the modules with adapters.

    Arrays of `base` may be shapes. A tied table appears twice: PEFT has a module for each use.
    """
    tensors = tensors_in_class(base, names)
    if base.unembedding is None:
        table = next(each for each in tensors if each.pieces[0].path == "embedding")
        head = names.tensor_of("unembedding")
        tensors.append(table._replace(name=names.modules.get(head, head)))
    found = []
    for each in tensors:
        module, _, kind = each.name.rpartition(".")
        within = "base_layer." if module in adapted else ""
        found.append(Whole(f"{PREFIX}{module}.{within}{kind}", each))
    return found


def is_saved(tensor: str, modules: Iterable[str]) -> bool:
    """True if a module that contains `tensor` is among `modules`, names of `modules_to_save`."""
    parts = tensor.split(".")
    holders = [".".join(parts[:count]) for count in range(1, len(parts))]
    return any(holder.endswith(name) for name in modules for holder in holders)


class Kept(NamedTuple):
    """The tensors that are written in full, and how adapter_config.json describes them."""

    tensors: tuple[Whole, ...]  # the tensors
    modules: tuple[str, ...]  # their names for `modules_to_save`
    biases: bool  # True if they include biases of adapted modules
    tied: bool  # True if they include a tied table


def kept(base: Any, names: Names, adapted: Collection[str], changed: Collection[str]) -> Kept:
    """Returns the tensors to write for the weights at the paths `changed`.

    Raises ValueError if one of these weights is in the matrix of an adapted module.
    """
    tensors = tensors_of(base, names, adapted)
    touched = [each for each in tensors if each.holds(changed)]
    for each in touched:
        if each.module in adapted and not each.is_bias:
            raise ValueError(
                f"PEFT's format has no place for the trained {each.tensor.name} beside adapters of "
                "the same module: write the model with its adapters merged, or, if the weight was "
                "trained before the adapters, give as base a folder that has it so"
            )
    modules = {each.module for each in touched}
    biases = modules & set(adapted)
    written = [w for w in tensors if w.module in modules and (w.is_bias or w.module not in biases)]
    tied = base.unembedding is None and any(each.holds(("embedding",)) for each in written)
    return Kept(tuple(written), _named(modules - biases, tensors), bool(biases), tied)


def _named(modules: Collection[str], tensors: Sequence[Whole]) -> tuple[str, ...]:
    """Shortens names to suffixes ("input_layernorm") if no other module's name ends with it."""
    found: list[str] = []
    for name, module in ((each.tensor.name, each.module) for each in tensors):
        if module in modules and not is_saved(name, found):
            end = module.rpartition(".")[2]
            meant = {each.module for each in tensors if is_saved(each.tensor.name, (end,))}
            found.append(end if meant <= set(modules) else module)
    return tuple(found)


def held(
    base: Any, names: Names, adapted: Collection[str], config: PeftConfig, there: Collection[str]
) -> list[Whole]:
    """Returns the tensors that a folder contains in full, or must contain by its config.

    `there` are the names of the folder's tensors. Raises ValueError if the folder saves only one of
    the two uses of a tied table.
    """
    tensors = tensors_of(base, names, adapted)
    found = [w for w in tensors if w.name in there or is_saved(w.tensor.name, config.saved)]
    tables = [each for each in found if each.holds(("embedding",))]
    saved = [each.module for each in tables if is_saved(each.tensor.name, config.saved)]
    if saved and base.unembedding is None and len(tables) == 1:
        raise ValueError(
            f"modules_to_save has {saved[0]}, but not the other use of the same table: PEFT's "
            "model embeds with one table and unembeds with another, where the base has one"
        )
    return found
