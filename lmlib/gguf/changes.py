"""How tensors of GGUF files differ from Hugging Face's, both ways.

Source: conversion/ in https://github.com/ggml-org/llama.cpp.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Config = Mapping[str, Any]  # the content of a config.json


class Change(NamedTuple):
    """How a tensor of Hugging Face's differs in a GGUF file, both ways.

    Attributes:
      there: the tensor or tensors in the file.
      back: the tensor of Hugging Face's that has these tensors in the file.
      names: what the end of its name becomes, for each of the tensors; `None`: one of this name.
    """

    there: Callable[[np.ndarray, Config], Sequence[np.ndarray]]
    back: Callable[[Sequence[np.ndarray], Config], np.ndarray]
    names: tuple[str, ...] | None = None


def heads(config: Config) -> int:
    return config.get("num_attention_heads") or config["n_head"]


def head_dim(config: Config) -> int:
    width = config.get("hidden_size") or config["n_embd"]
    return config.get("head_dim") or width // heads(config)


def _halves_to_pairs(x: np.ndarray, count: int) -> np.ndarray:
    """Reorders each head's rows from two halves to pairs, which llama.cpp turns for Llama."""
    split = x.reshape(count, 2, -1, *x.shape[1:])
    return split.swapaxes(1, 2).reshape(x.shape)


def _pairs_to_halves(x: np.ndarray, count: int) -> np.ndarray:
    split = x.reshape(count, -1, 2, *x.shape[1:])
    return split.swapaxes(1, 2).reshape(x.shape)


def one(
    there: Callable[[np.ndarray, Config], np.ndarray],
    back: Callable[[np.ndarray, Config], np.ndarray],
    name: str | None = None,
) -> Change:
    """Returns the change of a tensor that is one tensor there."""
    return Change(
        lambda x, config: (there(x, config),),
        lambda parts, config: back(parts[0], config),
        None if name is None else (name,),
    )


def renamed(name: str) -> Change:
    return one(lambda x, config: x, lambda x, config: x, name)


def _turned(count: Callable[[Config], int]) -> Change:
    return one(
        lambda x, config: _halves_to_pairs(x, count(config)),
        lambda x, config: _pairs_to_halves(x, count(config)),
    )


def _regrouped(x: np.ndarray, first: int, second: int) -> np.ndarray:
    """Swaps two factors of the first axis: [first · second · rest] to [second · first · rest]."""
    return x.reshape(first, second, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


PAIRS = {
    "q_proj.weight": _turned(heads),
    "k_proj.weight": _turned(lambda config: config["num_key_value_heads"]),
}

TRANSPOSED = one(lambda x, config: x.T, lambda x, config: x.T)

# Gemma's scales have 1 added, which rounds; both programs multiply by the sum.
PLUS_ONE = one(lambda x, config: x + 1, lambda x, config: x.astype(np.float32) - 1)

# The rate by which a state decays, as llama.cpp multiplies by it, instead of its logarithm.
RATE = one(lambda x, config: -np.exp(x), lambda x, config: np.log(-x.astype(np.float32)))
# The filters of a convolution, whose second axis has one element.
WITHOUT_SECOND = one(lambda x, config: x[:, 0], lambda x, config: x[:, None])

BY_HEAD = one(
    lambda x, config: _regrouped(x, heads(config), 3),
    lambda x, config: _regrouped(x, 3, heads(config)),
)


def swapped(name: str) -> Change:
    """Returns the change of all experts' matrices, which have their outputs first there."""
    return one(lambda x, config: x.swapaxes(1, 2), lambda x, config: x.swapaxes(1, 2), name)


def _in_turn(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.stack([x, y], -1).reshape(*x.shape[:-1], -1)


# gpt-oss has the gates and ups of all experts in one tensor, with alternating columns.
GATE_UP = Change(
    lambda x, config: (x[..., ::2].swapaxes(1, 2), x[..., 1::2].swapaxes(1, 2)),
    lambda parts, config: _in_turn(*(part.swapaxes(1, 2) for part in parts)),
    ("gate_proj.weight", "up_proj.weight"),
)

GATE_UP_BIAS = Change(
    lambda x, config: (x[..., ::2], x[..., 1::2]),
    lambda parts, config: _in_turn(*parts),
    ("gate_proj.bias", "up_proj.bias"),
)


def halves(axis: int, module: str) -> Change:
    """Returns the change of gates and ups that Hugging Face has in one tensor, along `axis`."""
    return Change(
        lambda x, config: np.split(x, 2, axis),
        lambda parts, config: np.concatenate(parts, axis),
        (f"{module}.gate_proj.weight", f"{module}.up_proj.weight"),
    )


def _key_and_value(x: np.ndarray, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Splits the matrix that makes keys and values of latents; keys' parts are transposed."""
    x = x.reshape(heads(config), -1, x.shape[-1])
    size = config["qk_nope_head_dim"]
    return x[:, :size].swapaxes(1, 2), x[:, size:]


def _key_with_value(parts: Sequence[np.ndarray], config: Config) -> np.ndarray:
    whole = np.concatenate([parts[0].swapaxes(1, 2), parts[1]], 1)
    return whole.reshape(-1, whole.shape[-1])


LATENT = Change(_key_and_value, _key_with_value, ("k_b_proj.weight", "v_b_proj.weight"))


def _deltanet_sizes(config: Config) -> tuple[int, list[int]]:
    """Returns the key heads of a DeltaNet, and each one's rows of queries, keys, values, gates."""
    groups, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value_rows = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    return groups, [key_dim, key_dim, value_rows, value_rows]


def by_kind(x: np.ndarray, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Reorders rows by kind, which Hugging Face has by key head; gates are apart."""
    groups, rows = _deltanet_sizes(config)
    kinds = np.split(x.reshape(groups, -1, x.shape[-1]), np.cumsum(rows)[:-1], 1)
    flat = [kind.reshape(-1, x.shape[-1]) for kind in kinds]
    return np.concatenate(flat[:3]), flat[3]


def by_key_head(parts: Sequence[np.ndarray], config: Config) -> np.ndarray:
    groups, rows = _deltanet_sizes(config)
    kinds = np.split(np.concatenate(parts), np.cumsum(rows)[:-1] * groups)
    whole = [kind.reshape(groups, -1, kind.shape[-1]) for kind in kinds]
    return np.concatenate(whole, 1).reshape(-1, parts[0].shape[-1])
