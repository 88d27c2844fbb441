"""Mixtures of experts in folders: a tensor for each expert, and the keys of routers. In classes of
transformers 5 a tensor is of all experts."""

from typing import Any

from lmlib.hf.folder import FolderError
from lmlib.hf.names import Tensor
from lmlib.hf.parts import a, layers
from lmlib.hf.settings import Settings
from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
IN_CLASS = (
    Tensor("mlp.gate.weight", {"mlp.router.logits": ("choice", "embed")}),
    Tensor(
        "mlp.experts.gate_up_proj",
        {
            "mlp.experts.gate": ("expert", "mlp", "embed"),
            "mlp.experts.up": ("expert", "mlp", "embed"),
        },
        along=1,
    ),
    Tensor("mlp.experts.down_proj", {"mlp.experts.down": ("expert", "embed", "mlp")}),
)
_COUNTS = ("num_experts", "num_local_experts")


def mixture(
    module: str = "mlp", matrices: tuple[str, str, str] = GATE_UP_DOWN
) -> tuple[Tensor, ...]:
    """The tensors of a layer's router and experts.

    Args:
      module: in which they are.
      matrices: the names of an expert's gate, up and down.
    """
    gate, up, down = (f"{module}.experts.{{expert}}.{name}.weight" for name in matrices)
    return (
        Tensor(f"{module}.gate.weight", {"mlp.router.logits": ("choice", "embed")}),
        Tensor(gate, {"mlp.experts.gate": ("mlp", "embed")}),
        Tensor(up, {"mlp.experts.up": ("mlp", "embed")}),
        Tensor(down, {"mlp.experts.down": ("embed", "mlp")}),
    )


def routing(settings: Settings, experts: int, top: int) -> dict[str, Any]:
    """How many experts there are and each token goes to; `experts` and `top` where config.json does
    not say. transformers 5 writes the former under two names, and reads both in all families."""
    # Of losses and noise in training, and of what is returned beside the logits.
    settings.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    told = {key: settings.take(key, None) for key in _COUNTS}
    counts = {count for count in told.values() if count is not None}
    if len(counts) > 1:
        both = " and ".join(f"{key} = {count}" for key, count in told.items())
        raise FolderError(f"{settings.where}: {both} contradict each other")
    return {
        "experts": counts.pop() if counts else experts,
        "top": settings.take("num_experts_per_tok", top),
    }


def routing_settings(model: Decoder, count: str = "num_experts") -> dict[str, Any]:
    """The keys that `routing` reads.

    Args:
      count: the name under which older readers look for the number of experts.

    Raises:
      ValueError: if the model has no mixtures.
    """
    router = mixtures(model)[0].router
    return {count: router.experts, "num_experts_per_tok": router.top}


def mixtures(model: Decoder) -> list[Mixture]:
    """Of each layer.

    Raises:
      ValueError: if a layer has none.
    """
    return [a(Mixture, layer.mlp) for layer in layers(model, Block)]
