"""Which activations the forward pass keeps for the backward pass, by name.

Layers and their parts name them (`lmlib.models.part.Names`). What is not kept is computed again,
layer by layer, from "layer_input" and "head_input", which are always kept (Chen et al. 2016,
arXiv:1604.06174). So are `CHOICES`, which are small, and may fall otherwise when they are computed
again with other rounding.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lmlib.compute import EVERYTHING, Compute

CHOICES = "choices"  # of a router
_CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"  # JAX's name of the primitive


def policy(compute: Compute, names: Sequence[str]) -> Callable[..., Any]:
    """For `jax.checkpoint`: keep what `compute` saves of `names` on the device, what it offloads in
    the host's memory, and nothing else."""
    saved = compute.kept(names)
    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*_inner_names(saved), CHOICES],
        names_which_can_be_offloaded=_inner_names(compute.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def keep(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        # The kernel cannot name its result.
        if primitive.name == _CUDNN_FORWARD and "attention" in saved:
            return True
        return by_name(primitive, *arguments, **parameters)

    return keep


def _inner_names(names: Sequence[str]) -> list[str]:
    """As the kernels name their outputs, from which the outer value follows for nothing: besides
    attention's output one number for each head and position."""
    return ["attention_kernel" if name == "attention" else name for name in names]


def check_names(compute: Compute, names: Sequence[str]) -> None:
    """Raises ValueError if `compute` saves or offloads what is not among `names`."""
    for setting in ("saved", "offloaded"):
        chosen = getattr(compute, setting)
        for name in () if setting == "saved" and chosen == EVERYTHING else chosen:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"{setting} has the unknown name {name!r}; {hint}(this model's layers name "
                    f"{', '.join(names)})"
                )
