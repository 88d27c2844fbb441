"""Which tensors of a folder hold which weights: a declaration, from which both ways follow.

    Tensor("self_attn.q_proj.weight", {"attention.query": ("heads head_dim", "embed")})

says that the file's matrix has the rows "heads head_dim" and the columns "embed", where the
weight's own axes are "embed heads head_dim" (`lmlib.hf.share`). A file's tensor can hold several
weights, and a weight can be in several tensors.
"""

import collections
import dataclasses
import itertools
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmlib.hf.share import Share
from lmlib.parallel.axes import Weight, map_weights


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a folder, or one for each index of an axis: "experts.{expert}.w1.weight".

    Args:
      name: in the folder; of a layer, what follows the layer's prefix. In braces, the axes of ours
        whose indices are part of the name.
      holds: the axes of each weight in it, by the weight's path (in a layer: within the block); an
        axis of the tensor can be several of ours ("heads head_dim").
      along: the axis along which several weights follow each other.
      each: an axis of ours, for each of whose indices they do so: with "kv_heads", the query, key
        and value of one head come before those of the next. `None`: they follow each other once.
    """

    name: str
    holds: Mapping[str, tuple[str, ...]]
    along: int = 0
    each: str | None = None

    @property
    def enumerated(self) -> tuple[str, ...]:
        """The axes whose indices are part of the name."""
        return tuple(axis for _, axis, _, _ in string.Formatter().parse(self.name) if axis)


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensors of a family.

    Args:
      outside: those that are of no layer.
      layer: those of each layer.
      prefix: of the layers' names, with `{layer}` for the layer's number.
      base: what names of all but the head begin with; folders of a trunk alone leave it out.
      without_effect: ends of further names that a folder may hold, which mean nothing.
      modules: names in the class, by which PEFT goes, of tensors that have another in a folder.
      in_class: tensors that a layer's class has in place of those that hold the same weights in a
        folder, as of all experts together; by these too PEFT goes.
      not_adapted: ends of modules' names that PEFT takes for those of experts, where others have
        them too.
      in_float32: by the dtype of a file, parts of the names of tensors that stay in float32, as in
        transformers: `_keep_in_fp32_modules` of a class means float16, its `_strict` bfloat16 too.
    """

    outside: Sequence[Tensor]
    layer: Sequence[Tensor]
    prefix: str = "model.layers.{layer}."
    base: str = "model."
    without_effect: tuple[str, ...] = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_class: Sequence[Tensor] = ()
    not_adapted: tuple[str, ...] = ()
    in_float32: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def tensor_of(self, path: str) -> str:
        """The tensor that holds a weight which is of no layer.

        Raises:
          ValueError: if the family names none; a tied family names its head too, since folders may
            hold it.
        """
        for each in self.outside:
            if path in each.holds:
                return each.name
        raise ValueError(
            f"the names of this family have no tensor for {path!r} among those outside of layers "
            f"({', '.join(each.name for each in self.outside)}); add a Tensor that holds it, also "
            "where the head is tied to the table, since folders may repeat it"
        )

    def float32_in(self, tensor: str) -> tuple[str, ...]:
        """The dtypes of files that hold the tensor of this name in float32."""
        kept = self.in_float32.items()
        return tuple(dtype for dtype, parts in kept if any(part in tensor for part in parts))


class Piece(NamedTuple):
    """A weight in a tensor.

    Args:
      path: in the model.
      repetition: the index in its stack; `None`: it is not stacked.
      share: what of the tensor it is, without the axes below.
      fixed: the index along each of the weight's own axes that the tensor's name enumerates, by the
        axis' place.
    """

    path: str
    repetition: int | None
    share: Share
    fixed: tuple[tuple[int, int], ...] = ()

    @property
    def at(self) -> tuple[int | slice, ...]:
        """Where in the weight its values are, as NumPy counts."""
        fixed = dict(self.fixed)
        own = (fixed.get(place, slice(None)) for place in range(max(fixed, default=-1) + 1))
        return (*(() if self.repetition is None else (self.repetition,)), *own)


class Placed(NamedTuple):
    """A tensor of a folder: its whole shape, the weights in it, in their order, and the dtypes of
    files that hold it in float32."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    float32_in: tuple[str, ...] = ()

    def dtype_in(self, dtype: str) -> str:
        """Its dtype in a file of `dtype`."""
        return "float32" if dtype in self.float32_in else dtype


def placed(model: Any, names: Names) -> list[Placed]:
    """The tensors of `model` (arrays or their shapes), every weight once.

    Raises:
      ValueError: if a weight is in no tensor, or a tensor's axes are not its weights'.
    """
    weights = _weights(model)
    found: list[Placed] = []
    for tensor in names.outside:
        if all(path in weights for path in tensor.holds):
            found += _placed(tensor, "", {path: (path, None) for path in tensor.holds}, weights)
    for number, (block, repetition) in enumerate(_layers(weights)):
        for tensor in names.layer:
            paths = {path: (f"{block}.{path}", repetition) for path in tensor.holds}
            if all(path in weights for path, _ in paths.values()):
                found += _placed(tensor, names.prefix.format(layer=number), paths, weights)
    held = {piece.path for each in found for piece in each.pieces}
    if lost := sorted(set(weights) - held):
        raise ValueError(f"the family's names have no place for {', '.join(lost)}")
    return [each._replace(float32_in=names.float32_in(each.name)) for each in found]


def least_count(model: Any, names: Names) -> tuple[int, int]:
    """How many layers have tensors of their own, and how many of these are of one kind, as of
    experts; nothing is listed."""
    weights = _weights(model)
    layers = collections.Counter(block for block, _ in _layers(weights))
    alike = [0] * len(names.layer)
    for block, count in layers.items():
        for number, tensor in enumerate(names.layer):
            held = [weights[path] for own in tensor.holds if (path := f"{block}.{own}") in weights]
            size = {a: n for each in held for a, n in zip(each.axes, each.sizes, strict=True)}
            alike[number] += count * math.prod(size.get(axis, 0) for axis in tensor.enumerated)
    return layers.total(), max(alike, default=0)


class _Weight(NamedTuple):
    """The axes and sizes of a layer's weight, and how many are stacked (`None`: it is not)."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    layers: int | None


def _weights(model: Any) -> dict[str, _Weight]:
    """By path."""
    found: dict[str, _Weight] = {}

    def note(weight: Weight, array: Any) -> None:
        layers = array.shape[0] if weight.stacked else None
        found[weight.path] = _Weight(weight.own_axes, array.shape[weight.stacked :], layers)

    map_weights(note, model)
    return found


def _layers(weights: Mapping[str, _Weight]) -> Iterator[tuple[str, int]]:
    """The block and the repetition of each layer, in order."""
    blocks: dict[int, dict[str, int]] = {}
    for path, weight in weights.items():
        if path.startswith("stack.") and weight.layers is not None:
            _, _, segment, j, _ = path.split(".", 4)
            blocks.setdefault(int(segment), {})[f"stack.patterns.{segment}.{j}"] = weight.layers
    for _, pattern in sorted(blocks.items()):
        for repetition in range(next(iter(pattern.values()))):
            yield from ((block, repetition) for block in pattern)


def _placed(
    tensor: Tensor,
    prefix: str,
    paths: Mapping[str, tuple[str, int | None]],
    weights: Mapping[str, _Weight],
) -> Iterator[Placed]:
    """The tensor, or one for each index of the axes that its name enumerates."""
    size = dict[str, int]()
    for own, within in tensor.holds.items():
        axes, sizes, _ = weights[paths[own][0]]
        size |= zip(axes, sizes, strict=True)
        if sorted([*tensor.enumerated, *" ".join(within).split()]) != sorted(axes):
            named = ", ".join([*tensor.enumerated, *within])
            raise ValueError(
                f"{prefix}{tensor.name} names the axes {named} for {paths[own][0]}, whose axes are "
                f"{', '.join(axes)}"
            )
    if tensor.each is not None and tensor.each not in size:
        raise ValueError(f"{prefix}{tensor.name}: no weight in it has the axis {tensor.each}")
    groups = 1 if tensor.each is None else size[tensor.each]
    for indices in itertools.product(*(range(size[axis]) for axis in tensor.enumerated)):
        at = dict(zip(tensor.enumerated, indices, strict=True))
        name, pieces, start = prefix + tensor.name.format(**at), list[Piece](), 0
        for own, within in tensor.holds.items():
            path, repetition = paths[own]
            axes = weights[path].axes
            kept = tuple(axis for axis in axes if axis not in at)
            sizes = tuple(size[axis] for axis in kept)
            share = Share(kept, sizes, tuple(within), tensor.along, start, groups)
            if share.shape[tensor.along] % groups:
                raise ValueError(
                    f"{name}: {path} has {share.shape[tensor.along]} for {tensor.each} = {groups}, "
                    "of which that is no multiple"
                )
            fixed = tuple((place, at[axis]) for place, axis in enumerate(axes) if axis in at)
            pieces.append(Piece(path, repetition, share, fixed))
            start += share.length
        whole = list(pieces[0].share.shape)
        whole[tensor.along] = start * groups
        yield Placed(name, tuple(whole), tuple(pieces))


def check_complete(
    wanted: Sequence[Placed], there: Mapping[str, tuple[int, ...]], without_effect: Sequence[str]
) -> None:
    """Checks that each tensor is used exactly once.

    Args:
      there: shapes of the folder's tensors.
      without_effect: ends of names that may be there and mean nothing.

    Raises:
      ValueError: naming what is missing, misshapen or left over.
    """
    problems = []
    for tensor in wanted:
        if tensor.name not in there:
            problems.append(f"{tensor.name} is missing")
        elif tuple(there[tensor.name]) != tensor.shape:
            problems.append(
                f"{tensor.name} has shape {tuple(there[tensor.name])} instead of {tensor.shape}"
            )
    left = set(there) - {tensor.name for tensor in wanted}
    problems += [
        f"{name} is unknown" for name in sorted(left) if not name.endswith(tuple(without_effect))
    ]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError("; ".join(problems[:5]) + more)
