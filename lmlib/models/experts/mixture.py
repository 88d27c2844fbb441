"""A feed-forward layer of experts; each token uses only a few of them.

Shapes: B batch, S sequence, E embed.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.experts.dispatches import DISPATCHES
from lmlib.models.experts.grouped import IMPLEMENTATIONS
from lmlib.models.experts.mlps import GatedExperts
from lmlib.models.experts.rounds import KEPT, Settings, best_dispatch, mix_experts
from lmlib.models.experts.router import Router
from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import ActivationNames, AuxOutputs, Part, checked, merge_names
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.weights import fold_in_name, product_flops
from lmlib.parallel.collectives import in_a_stage


class Mixture(Part):
    """A mixture-of-experts layer: a weighted sum of the outputs of each token's experts.

    The weights are the router's shares (Shazeer et al. 2017, arXiv:1701.06538, eq. 1). Shared
    experts process all tokens (Dai et al. 2024, arXiv:2401.06066, §3.2). No token is dropped: the
    statistic `expert_dropped`, the fraction of choices that were not computed, is 0.

    Args:
      mlp: the size of each expert.
      experts, top: the number of experts, which the mesh axis `expert` splits, and of each token.
      shared_mlp: size of the shared experts, which are one MLP; `None`: no shared experts.
      router, mlps, shared: make the parts: `functools.partial(Router, scores="sigmoid")`.
      residual_scale: scale of the initial values of the output matrices.
    """

    rows_may_be_split = True

    router: Router
    experts: GatedExperts
    shared: GatedMLP | None

    def __init__(
        self,
        embed: int,
        mlp: int,
        residual_scale: float = 1.0,
        *,
        experts: int,
        top: int,
        shared_mlp: int | None = None,
        router: Callable[..., Router] = Router,
        mlps: Callable[..., Any] = GatedExperts,
        shared: Callable[..., Any] = GatedMLP,
        key: PRNGKeyArray,
    ):
        self.router = router(embed, experts, top, key=fold_in_name(key, "router"))
        scale, of_experts = residual_scale, fold_in_name(key, "experts")
        self.experts = mlps(embed, mlp, experts, residual_scale=scale, key=of_experts)
        of_shared = {"residual_scale": scale, "key": fold_in_name(key, "shared")}
        self.shared = None if shared_mlp is None else shared(embed, shared_mlp, **of_shared)

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> tuple[Float[Array, "b s embed"], AuxOutputs]:
        """Applies the layer, with the communication of `rounds.mix_experts`."""
        compute, routing = context.compute, self.router(x_BSE, context)
        with jax.named_scope("experts"):
            top = self.router.top
            dispatch = best_dispatch(top) if compute.dispatch == "auto" else compute.dispatch
            settings = Settings(
                self.router.experts,
                dispatch,
                compute.expert_room,
                compute.residual,
                compute.grouped,
                in_a_stage(),
                compute.expert_parts,
            )
            y_BSE, computed_BS = mix_experts(
                settings, self.experts, x_BSE, routing.choices_BSK, routing.shares_BSK
            )
        aux = routing.aux
        dropped = context.total(jax.lax.stop_gradient(1 - computed_BS))
        aux = aux._replace(statistics=aux.statistics | {"expert_dropped": dropped})
        if self.shared is not None:
            shared_BSE, _ = checked(self.shared, self.shared(x_BSE, context), y_BSE, "reports")
            y_BSE += shared_BSE
        return y_BSE, aux

    def updated(self, tallies: Any) -> "Mixture":
        return eqx.tree_at(lambda mlp: mlp.router, self, self.router.updated(tallies))

    def measured(self, tallies_X: Float[Array, "choice"]) -> dict[str, Float[Array, ""]]:
        """The largest and smallest load of an expert, relative to the mean."""
        mean = jnp.maximum(jnp.mean(tallies_X), 1)
        most, fewest = jnp.max(tallies_X) / mean, jnp.min(tallies_X) / mean
        return {"expert_most_tokens": most, "expert_fewest_tokens": fewest}

    @property
    def used_shares(self) -> dict[str, float]:
        """The fraction of the experts that a token uses."""
        return {"experts": self.router.top / self.router.experts}

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        active = product_flops(self.experts) * self.used_shares["experts"]
        return active + product_flops(self.router) + product_flops(self.shared)

    def check(self, sequence_length: int, compute: Compute) -> None:
        for name, methods in (("dispatch", DISPATCHES), ("grouped", IMPLEMENTATIONS)):
            if (value := getattr(compute, name)) not in (known := ("auto", *methods)):
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if compute.precision("mlp") is not None:
            raise ValueError(
                f"quantized has mlp={compute.precision('mlp')!r}: products of experts are not "
                "quantized; leave it out"
            )

    @property
    def names(self) -> ActivationNames:
        of_shared = ActivationNames() if self.shared is None else self.shared.names
        return merge_names(self.router.names, ActivationNames(KEPT, ("experts",)), of_shared)
