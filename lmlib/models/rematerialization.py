"""Which activations the forward pass keeps for the backward pass, by name.

What is not kept is computed again, layer by layer, from "layer_input" and "head_input", which are
always kept (Chen et al. 2016, arXiv:1604.06174).
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lmlib.models.attend import cudnn

# In the order of computing; see `checkpoint_name` in this folder. "attention" keeps, besides the
# output, what a fused kernel needs of it: one number for each head and position.
ACTIVATIONS = (
    "attention_input",
    "query",
    "key",
    "value",
    "attention",
    "attention_residual",
    "mlp_input",
    "mlp_gate",
    "mlp_up",
    "mlp_hidden",
)


def policy(saved: Sequence[str], offloaded: Sequence[str]) -> Callable[..., Any]:
    """For `jax.checkpoint`: keep what `saved` names on the device, what `offloaded` names in the
    host's memory, and nothing else."""
    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=_inner_names(saved),
        names_which_can_be_offloaded=_inner_names(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def keep(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        # cuDNN's kernel cannot name what it returns.
        if primitive.name == cudnn.KERNEL and "attention" in saved:
            return True
        return by_name(primitive, *arguments, **parameters)

    return keep


def _inner_names(names: Sequence[str]) -> list[str]:
    """As the kernels name their outputs, from which the outer value follows for nothing."""
    return ["attention_kernel" if name == "attention" else name for name in names]


def check_names(**settings: Sequence[str]) -> None:
    """Raises ValueError if a setting has an unknown name."""
    for setting, names in settings.items():
        for name in names:
            if name not in ACTIVATIONS:
                near = difflib.get_close_matches(name, ACTIVATIONS, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"{setting} has the unknown name {name!r}; {hint}"
                    f"(known: {', '.join(ACTIVATIONS)})"
                )
