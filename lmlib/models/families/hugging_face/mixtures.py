"""Mixtures of experts in folders: a tensor for each expert, and the router's keys."""

from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Key, Names, Tensor

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
# Classes of transformers 5 have one tensor for all experts.
IN_CLASS = (
    Tensor("mlp.gate.weight", {"mlp.router.logits": ("choice", "embed")}),
    Tensor(
        "mlp.experts.gate_up_proj",
        {f"mlp.experts.{name}": ("experts", "mlp", "embed") for name in ("gate", "up")},
        along=1,
    ),
    Tensor("mlp.experts.down_proj", {"mlp.experts.down": ("experts", "embed", "mlp")}),
)
# These concern losses and noise in training, and further outputs.
IGNORED = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def tensors(
    module: str = "mlp", matrices: tuple[str, str, str] = GATE_UP_DOWN
) -> tuple[Tensor, ...]:
    """Returns the tensors of a layer's router and experts, in `module`.

    `matrices` are the names of an expert's gate, up and down projections.
    """
    gate, up, down = (f"{module}.experts.{{experts}}.{name}.weight" for name in matrices)
    return (
        Tensor(f"{module}.gate.weight", {"mlp.router.logits": ("choice", "embed")}),
        Tensor(gate, {"mlp.experts.gate": ("mlp", "embed")}),
        Tensor(up, {"mlp.experts.up": ("mlp", "embed")}),
        Tensor(down, {"mlp.experts.down": ("embed", "mlp")}),
    )


def mixture_names(*layer: Tensor) -> Names:
    """Returns Llama's tensors, with experts and the tensors `layer` in place of each MLP."""
    layer = (*shared.ATTENTION, *shared.NORMS_BEFORE, *layer)
    return Names(shared.OUTSIDE, layer, in_class=IN_CLASS)


def router(model: Decoder) -> Router:
    """Returns the first layer's router; raises ValueError if it has none."""
    return parts.mlp(model, Mixture).router


NORMALIZED = Key(
    "norm_topk_prob", "normalized", lambda model: router(model).normalized, False, bool
)


def mixture_keys(
    *more: Key, experts: int, top: int, count: str = "num_experts", **others: Any
) -> tuple[Key, ...]:
    """Returns the keys of Llama and of a mixture, and `more`.

    `experts` and `top` are defaults. `count` is the name of the number of experts for older
    readers; transformers 5 writes two names, and reads both. `others` are as in
    `shared.llama_keys`.
    """
    names = {"num_experts", "num_local_experts"}
    return shared.llama_keys(
        Key(
            count, "experts", lambda model: router(model).experts, experts,
            also=(*(names - {count}),),
        ),
        Key("num_experts_per_tok", "top", lambda model: router(model).top, top),
        *more, mlp=Mixture, **others,
    )  # fmt: skip
