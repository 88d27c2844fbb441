"""The choice of weights that train, in groups with their own rate and decay."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from lmlib.models.matrices.lora import DOWN_RANK, UP_RANK, is_adapted
from lmlib.models.part import Part
from lmlib.optim.optimizer import Decays, Optimizer, by_weight
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.selection import SelectionError, named_weights, selected


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that train with the same settings.

    Args:
      paths, axes: select the weights, as in `lmlib.parallel.selection.selected`.
      learning_rate: factor of the optimizer's learning rate.
      decays: True if weight decay applies; `None`: as each weight declares.

    Raises:
      ValueError: if the factor is not positive.
    """

    paths: Sequence[str] = ()
    axes: Sequence[str] = ()
    learning_rate: float = 1.0
    decays: bool | None = None

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(
                f"learning_rate of a group must be positive, got {self.learning_rate}: weights "
                "that are in no group do not train"
            )


Groups = Mapping[str, Group]


def adapters(learning_rate_of_up: float = 1.0, besides: Sequence[str] = ()) -> Groups:
    """Trains only the adapters of a model, for `Experiment.trainable`.

    Args:
      learning_rate_of_up: factor of the learning rate for the matrices that start at zero (LoRA+:
        Hayou et al. 2024, arXiv:2402.12354, uses 16).
      besides: patterns of the paths of other trained weights, like PEFT's `modules_to_save`.
    """
    more = {"besides": Group(paths=besides)} if besides else {}
    if learning_rate_of_up == 1:
        return {"adapters": Group(axes=(DOWN_RANK, UP_RANK))} | more
    up = Group(axes=(UP_RANK,), learning_rate=learning_rate_of_up)
    return {"down": Group(axes=(DOWN_RANK,)), "up": up} | more


def grouped(model: Any, groups: Groups) -> dict[str, str]:
    """The group of each weight that trains, by its path.

    Raises SelectionError if a pattern or an axis matches no weight, a weight is in two groups, a
    group is empty, or contains the base of an adapter.
    """
    weights, found = named_weights(model), dict[str, str]()
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_adapted)
    bases = {_path(keys) + ".base" for keys, node in nodes if is_adapted(node)}
    for name, group in groups.items():
        try:
            chosen = selected(weights, group.paths, group.axes)
        except SelectionError as error:
            raise SelectionError(f"trainable[{name!r}]: {error}") from None
        if not chosen:
            raise SelectionError(f"trainable[{name!r}] names no weights: give it paths or axes")
        for path in chosen:
            if path in found:
                raise SelectionError(
                    f"{path} is in trainable[{found[path]!r}] and in trainable[{name!r}]: make "
                    "their paths or axes narrower"
                )
            if path in bases:
                raise SelectionError(
                    f"trainable[{name!r}] has {path}, the base of an adapter, which gets no "
                    f"gradient: name what trains of it ({path.removesuffix('base')}down, …up), or "
                    "do not adapt it"
                )
            found[path] = name
    if not found:
        raise SelectionError(
            "trainable names no group, so no weights would train; use None to train all"
        )
    return found


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def flops_per_token(model: Any, groups: Groups | None, sequence_length: int, causal: bool) -> float:
    """FLOPs per token of a step that trains `groups` of `model`, as `Experiment.model` makes it.

    Without two for each frozen parameter that multiplies a token's activations, since its gradient
    is not computed.
    """
    flops = model.flops_per_token(sequence_length, causal)
    if groups is None:
        return flops
    trained, weights = grouped(model, groups), named_weights(model)
    tied = not any(one.declaration.multiplied and "vocab" in one.axes for one in weights.values())
    used = _used_shares(model)

    def count(weight: Weight, array: Any) -> None:
        nonlocal flops
        unembeds = tied and "vocab" in weight.axes
        if weight.path not in trained and (weight.declaration.multiplied or unembeds):
            share = next((used[at] for at in used if weight.path.startswith(at)), 1.0)
            flops -= 2.0 * array.size * share

    map_weights(count, model)
    return flops


def _used_shares(model: Any) -> dict[str, float]:
    """`Part.used_shares` of all parts, by the prefix of the weights' paths."""

    def has_shares(node: Any) -> bool:
        return isinstance(node, Part) and bool(node.used_shares)

    return {
        f"{_path(keys)}.{field}.": share
        for keys, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=has_shares)
        if has_shares(node)
        for field, share in node.used_shares.items()
    }


def with_rates(optimizer: Optimizer, model: Any, groups: Groups | None) -> Optimizer:
    """Multiplies the updates of `optimizer` by the learning rates of weights and of `groups`."""
    weights = named_weights(model)
    rates = {path: one.declaration.learning_rate for path, one in weights.items()}
    if groups is not None:
        for path, group in grouped(model, groups).items():
            rates[path] *= groups[group].learning_rate
    if set(rates.values()) == {1.0}:
        return optimizer

    scaled = by_weight(lambda weight: rates[weight.path])
    return optimizer._replace(
        transformation=optax.chain(optimizer.transformation, scaled),
        metrics=lambda state: optimizer.metrics(state[0]),
    )


def decays_by(groups: Groups, model: Any, otherwise: Decays) -> Decays:
    """Returns the `Decays` that uses the setting of a weight's group, else `otherwise`."""
    group_of = grouped(model, groups)

    def decays(weight: Weight) -> bool:
        said = groups[group_of[weight.path]].decays if weight.path in group_of else None
        return otherwise(weight) if said is None else said

    return decays
