"""The declaration of a family: names of tensors, and keys of config.json, both read and written.

    Tensor("self_attn.q_proj.weight", {"attention.query": ("heads head_dim", "embed")})

says that the file's matrix has the rows "heads head_dim" and the columns "embed", where the
weight's own axes are "embed heads head_dim". A file's tensor can hold several weights, and a weight
can be in several tensors. Reading and writing both follow from this (`lmlib.hf.names`).
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
    """A tensor of a folder, or one for each index of an axis: "experts.{expert}.w1.weight".

    Args:
      name: in the folder; in a layer, the part after the layer's prefix. In braces, our axes whose
        indices are part of the name.
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
      outside: tensors outside of layers.
      layer: tensors of each layer.
      prefix: of the layers' names, with `{layer}` for the layer's number.
      base: the beginning of all names except the head's; folders of a trunk alone leave it out.
      without_effect: ends of further names that a folder may hold and that mean nothing.
      modules: names in the class, by which PEFT goes, of tensors that have another in a folder.
      in_class: tensors that a layer's class has in place of those that hold the same weights in a
        folder, as of all experts together; PEFT goes by these too.
      not_adapted: ends of modules' names that PEFT takes for experts, which other families have.
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
        """The tensor that holds a weight outside of layers.

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


class Key(NamedTuple):
    """A key of config.json that is an argument of `build`.

    Args:
      name: in config.json.
      argument: its name.
      of: its value for a model, whose arrays may be shapes; `...`: it is not written.
      default, kind, zero, most, null: as in `Settings.take`.
      also: other names that files have for it.
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
        """The argument.

        Raises:
          FolderError: as `Settings.take`, or if two names have different values.
        """
        if not self.also:
            value = settings.take(
                self.name, self.default, self.kind, self.zero, self.most, self.null
            )
            return bool(value) if self.kind is bool else value  # null is false, as in a condition
        named = {name: settings.take(name, None, self.kind) for name in (*self.also, self.name)}
        found = {value for value in named.values() if value is not None}
        if len(found) > 1:
            both = " and ".join(f"{name} = {value}" for name, value in named.items())
            raise FolderError(f"{settings.where}: {both} contradict each other")
        return found.pop() if found else self.default


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """One kind of folder. Its keys that are not declared here are refused.

    Args:
      model_type: of config.json.
      transformers_class: the class of transformers that computes it.
      build: makes a model; a function of `lmlib.models.families`, or of your own.
      names: of its tensors.
      keys: of config.json, each an argument of `build`.
      rope: the keys of rotary positions; `None`: there are none, or `reads` reads them.
      fixed: keys with their only value, which is written.
      only: keys with the values that are accepted; they are not written.
      ignored: keys that have no effect.
      written: keys that are written only.
      reads: further arguments of `build`, of the settings and the arguments so far.
      writes: further keys, of a model. It raises ValueError where the model has parts that the
        family has not (`parts.a`). Whether the config.json describes the model exactly is checked
        afterwards.
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
        """Arguments of `build`, out of a config.json.

        Raises:
          FolderError: if it says something that the family does not have.
        """
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
        """A config.json of the model, whose arrays may be shapes; it has everything that
        `arguments` reads.

        Raises:
          ValueError: if the model has parts that the family has not.
        """
        found = {**self.fixed, **self.written}
        of_keys = {key.name: key.of(model) for key in self.keys}
        found |= {name: value for name, value in of_keys.items() if value is not ...}
        if self.rope is not None:
            rotaries = [each.rotary for each in attentions(model) if each.rotary is not None]
            rotary = rotaries[0] if rotaries else Rotary(head_dim(model))
            found |= self.rope.settings(rotary, head_dim(model))
        return found if self.writes is None else found | self.writes(model)
