"""Mamba-2 layers between layers of attention, as several families have them in folders."""

import math
from collections.abc import Callable
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts
from lmlib.models.families.hugging_face.family import Key, Tensor
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.recurrent.mamba2 import Mamba2


def attention_layers(model: Decoder) -> list[int]:
    """Returns the indices of layers without a `Mamba2`."""
    mixers = [layer.attention for layer in parts.layers(model)]
    return [index for index, each in enumerate(mixers) if not isinstance(each, Mamba2)]


# The projections, and the channels of the convolution, are joined.
_PROJECTED = {
    "gate": "heads value_dim", "input": "heads value_dim", "key": "kv_heads key_dim",
    "query": "kv_heads key_dim", "time": "heads",
}  # fmt: skip
_FILTERED = {name: _PROJECTED[name] for name in ("input", "key", "query")}
TENSORS = (
    Tensor(
        "mamba.in_proj.weight",
        {f"attention.{name}": (axes, "embed") for name, axes in _PROJECTED.items()},
    ),
    Tensor(
        "mamba.in_proj.bias",
        {
            f"attention.{'time_projection' if name == 'time' else name}_bias": (axes,)
            for name, axes in _PROJECTED.items()
        },
    ),
    # The second axis has one element: each channel has a filter of its own.
    Tensor(
        "mamba.conv1d.weight",
        {f"attention.{name}_filter": (axes, "", "width") for name, axes in _FILTERED.items()},
    ),
    Tensor(
        "mamba.conv1d.bias",
        {f"attention.{name}_filter_bias": (axes,) for name, axes in _FILTERED.items()},
    ),
    Tensor("mamba.A_log", {"attention.log_rate": ("heads",)}),
    Tensor("mamba.dt_bias", {"attention.time_bias": ("heads",)}),
    Tensor("mamba.D", {"attention.skip": ("heads",)}),
    Tensor("mamba.norm.weight", {"attention.norm_scale": ("heads value_dim",)}),
    Tensor("mamba.out_proj.weight", {"attention.output": ("embed", "heads value_dim")}),
    Tensor("mamba.out_proj.bias", {"attention.output_bias": ("embed",)}),
)
_ENDLESS = {"__float__": "Infinity"}  # as transformers 5 writes it
IGNORED = ("mamba_chunk_size", "use_mamba_kernels")


def _of(read: Callable[[Mamba2], Any], otherwise: Any = ...) -> Callable[[Decoder], Any]:
    """Returns a function that reads a setting of the first `Mamba2`, or `otherwise` without one."""

    def of(model: Decoder) -> Any:
        mixers = [layer.attention for layer in parts.layers(model)]
        return next((read(each) for each in mixers if isinstance(each, Mamba2)), otherwise)

    return of


KEYS = (
    # One divides every size.
    Key("mamba_n_heads", "mamba_heads", _of(lambda mamba: mamba.input.shape[-2], 1), 128),
    Key("mamba_n_groups", "mamba_groups", _of(lambda mamba: mamba.kv_heads), 1),
    Key("mamba_d_state", "mamba_state", _of(lambda mamba: mamba.key.shape[-1]), 256),
    Key("mamba_d_conv", "width", _of(lambda mamba: mamba.width), 4),
    Key(
        "mamba_conv_bias", "filter_bias", _of(lambda mamba: mamba.input_filter_bias is not None),
        True, bool,
    ),
    Key(
        "mamba_proj_bias", "projection_bias", _of(lambda mamba: mamba.input_bias is not None),
        False, bool,
    ),
)  # fmt: skip


def read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns `mamba_head_dim` and `time_limits`."""
    inner, heads = settings.take("mamba_expand", 2) * arguments["embed"], arguments["mamba_heads"]
    if inner % heads:
        raise settings.refused("mamba_n_heads", f"only divisors of {inner}")
    settings.only("mamba_d_head", "auto", inner // heads)
    limits = settings.take("time_step_limit", [0.0, _ENDLESS], list)
    numbers = tuple(math.inf if each == _ENDLESS else each for each in limits)
    if len(numbers) != 2 or not all(type(each) in (int, float) for each in numbers):
        raise settings.refused("time_step_limit", "only two numbers")
    limits = None if numbers == (0, math.inf) else numbers
    return {"mamba_head_dim": inner // heads, "time_limits": limits}


def written(model: Decoder) -> dict[str, Any]:
    """Returns the keys that `read` reads, except defaults."""
    size = _of(lambda mamba: mamba.input.shape[-2:], None)(model)
    limits = _of(lambda mamba: mamba.time_limits, None)(model)
    found = dict[str, Any]()
    if size is not None:
        embed = model.embedding.shape[-1]
        if math.prod(size) % embed:
            raise ValueError(
                f"a config.json cannot say {size[0]} heads of {size[1]}: together they must be a "
                f"multiple of embed = {embed}"
            )
        found = {"mamba_d_head": size[1], "mamba_expand": math.prod(size) // embed}
    if limits is not None:
        found["time_step_limit"] = [_ENDLESS if each == math.inf else each for each in limits]
    return found
