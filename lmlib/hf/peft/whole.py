"""Weights that a folder of adapters holds whole: the modules in PEFT's `modules_to_save`, and the
biases of adapted modules.

PEFT saves modules, not tensors: a norm with its bias, a matrix with its own. A name in
`modules_to_save` stands for every module whose name ends so, and for all that is in it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from lmlib.hf.names import Placed
from lmlib.hf.peft.config import PeftConfig
from lmlib.hf.peft.modules import PREFIX, tensors_in_class
from lmlib.models.families.hugging_face.family import Names


class Whole(NamedTuple):
    """A tensor of the base: its name in a folder of adapters, and its content."""

    name: str
    tensor: Placed

    @property
    def module(self) -> str:
        return self.tensor.name.rpartition(".")[0]

    @property
    def is_bias(self) -> bool:
        return self.tensor.name.endswith(".bias")

    def holds(self, paths: Collection[str]) -> bool:
        """Whether one of the weights at `paths` is in it."""
        return any(piece.path in paths for piece in self.tensor.pieces)


def tensors_of(base: Any, names: Names, adapted: Collection[str]) -> list[Whole]:
    """Every tensor of `base`, whose arrays may be shapes and whose modules `adapted` have adapters.
    A tied table is there twice: PEFT has a module for each of its uses."""
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
    """Whether `modules`, of `modules_to_save`, have a name for a module that `tensor` is in."""
    parts = tensor.split(".")
    holders = [".".join(parts[:count]) for count in range(1, len(parts))]
    return any(holder.endswith(name) for name in modules for holder in holders)


class Kept(NamedTuple):
    """The tensors that are written whole, their names for `modules_to_save`, whether there are
    biases of adapted modules, and whether there is a tied table."""

    tensors: tuple[Whole, ...]
    modules: tuple[str, ...]
    biases: bool
    tied: bool


def kept(base: Any, names: Names, adapted: Collection[str], changed: Collection[str]) -> Kept:
    """The tensors to write for the weights at the paths `changed`.

    Raises:
      ValueError: if one of them is in a matrix of an adapted module.
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
    """The same with ends of names, "input_layernorm", where no other module's name ends so."""
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
    """The tensors that a folder with the names `there` holds whole, or has to by its config.

    Raises:
      ValueError: if it saves one of the two uses of a tied table.
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
