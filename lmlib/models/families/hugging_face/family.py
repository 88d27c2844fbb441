"""Declares a family's tensor names and config.json keys, for reading and writing.

    Tensor("self_attn.q_proj.weight", {"attention.query": ("heads head_dim", "embed")})

says that the file's matrix has the rows "heads head_dim" and the columns "embed". A tensor in a
file can hold several weights, and a weight can be spread over several tensors (`lmlib.hf.names`).
"""

import dataclasses
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face.parts import attentions, head_dim
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import REQUIRED, FolderError, Settings
from lmlib.models.parts.rope import Rotary

_ROPE = Rope()


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a folder, or one for each index of an axis: "experts.{experts}.w1.weight".

    Args:
      name: in the folder; in a layer, the part after the layer's prefix.
      holds: maps the path of each weight (in a layer: within the block) to the tensor's axes. One
        of them can be several axes of lmlib ("heads head_dim").
      along, each: the axis along which several weights are concatenated, once, or for each index
        of an axis of lmlib, such as "kv_heads".
    """

    name: str
    holds: Mapping[str, tuple[str, ...]]
    along: int = 0
    each: str | None = None

    @property
    def enumerated(self) -> tuple[str, ...]:
        """Axes whose indices are part of the name."""
        return tuple(axis for _, axis, _, _ in string.Formatter().parse(self.name) if axis)


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensors of a family.

    Args:
      outside, layer, prefix: tensors outside layers, of each layer, and the prefix of the
        latter's names.
      base: prefix of all names except the head's; folders of a model without a head omit it.
      without_effect: suffixes of other names that a folder may contain.
      modules: maps tensors to their names in transformers' class, which PEFT uses, if these
        differ.
      in_class: tensors of a layer's class that replace tensors of the folder with the same
        weights.
      not_adapted: suffixes of modules' names that PEFT mistakes for another family's experts.
      in_float32: maps a file's dtype to parts of the names of tensors that stay in float32.
      heads: tensors of a head of multi-token prediction outside its layer, the matrix first.
      head, layer_in_head: prefixes of a head's tensors, and of its layer's within it. The `layer`
        of the first head is the number of layers.
      repeated: tensors of a head that repeat weights outside layers, which the head shares.
      renamed: maps parts of the names in some folders to the usual ones.
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
    heads: Sequence[Tensor] = ()
    head: str = "model.layers.{layer}."
    layer_in_head: str = ""
    repeated: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def tensor_of(self, path: str) -> str:
        """Returns the tensor that holds a weight outside layers, also a tied head."""
        for each in self.outside:
            if path in each.holds:
                return each.name
        raise ValueError(
            f"the names of this family have no tensor for {path!r} among those outside of layers "
            f"({', '.join(each.name for each in self.outside)}); add a Tensor that holds it, also "
            "where the head is tied to the table, since folders may repeat it"
        )

    def usual(self, name: str) -> str:
        """Returns the usual name of a folder's tensor."""
        for part, usual in self.renamed.items():
            name = name.replace(part, usual)
        return name

    def float32_in(self, tensor: str) -> tuple[str, ...]:
        """Returns the file dtypes for which the tensor of this name stays in float32."""
        kept = self.in_float32.items()
        return tuple(dtype for dtype, parts in kept if any(part in tensor for part in parts))


class Key(NamedTuple):
    """A key of config.json that is an argument of `build`.

    `of` returns the value for a model, whose arrays may be shapes, or `...` to omit the key.
    `default`, `kind`, `zero`, `most` and `null` are as in `Settings.take`; `also` are other names
    in files.
    """

    name: str
    argument: str
    of: Callable[[Decoder], Any]
    default: Any = REQUIRED
    kind: type = int
    zero: bool = False
    most: int | float | None = None
    null: bool = False
    also: tuple[str, ...] = ()

    def read(self, settings: Settings) -> Any:
        """Returns the argument's value; FolderError also if two names have different values."""
        options = self.default, self.kind, self.zero, self.most, self.null
        stated = [name for name in (*self.also, self.name) if name in settings] or [self.name]
        named = {name: settings.take(name, *options) for name in stated}
        value, *others = dict.fromkeys(named.values())
        if others:
            both = " and ".join(f"{name} = {value}" for name, value in named.items())
            raise FolderError(f"{settings.where}: {both} contradict each other")
        return bool(value) if self.kind is bool else value  # null counts as false


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """One kind of folder. Undeclared keys of its config.json are refused.

    Args:
      model_type, transformers_class: value in config.json, and the class of transformers.
      build: makes a model; a function of `lmlib.models.families`, or your own.
      names, keys: its tensors, and the keys of config.json that are arguments of `build`.
      rope: the keys of rotary positions; `None`: there are none, or `reads` reads them.
      fixed, only: map keys to their only value, which is also written, and to the accepted
        values.
      ignored, written: keys that have no effect, and keys and values that are written but not
        read.
      reads: returns further arguments of `build` from the settings and the arguments so far.
      writes: returns further keys for a model, or raises ValueError if it has parts that the
        family lacks (`parts.a`).
    """

    model_type: str
    transformers_class: str
    build: Callable[..., Any]
    names: Names
    keys: Sequence[Key] = ()
    rope: Rope | None = _ROPE
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    ignored: Sequence[str] = ()
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: Callable[[Settings, dict[str, Any]], dict[str, Any]] | None = None
    writes: Callable[[Decoder], dict[str, Any]] | None = None

    def arguments(self, settings: Settings) -> dict[str, Any]:
        """Returns the arguments of `build` that a config.json describes; raises FolderError."""
        for name, value in self.fixed.items():
            settings.only(name, value)
        for name, accepted in self.only.items():
            settings.only(name, *accepted)
        settings.ignore(*self.ignored)
        found = {key.argument: key.read(settings) for key in self.keys}
        if self.rope is not None:
            found |= self.rope.arguments(settings)
        return found if self.reads is None else found | self.reads(settings, found)

    def settings(self, model: Decoder) -> dict[str, Any]:
        """Returns a config.json of the model, whose arrays may be shapes; raises ValueError."""
        found = {**self.fixed, **self.written}
        of_keys = {key.name: key.of(model) for key in self.keys}
        found |= {name: value for name, value in of_keys.items() if value is not ...}
        if self.rope is not None:
            rotaries = [each.rotary for each in attentions(model) if each.rotary is not None]
            rotary = rotaries[0] if rotaries else Rotary(head_dim(model))
            found |= self.rope.settings(rotary, head_dim(model))
        return found if self.writes is None else found | self.writes(model)
