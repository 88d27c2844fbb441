"""A bare JAX training step: the same math as one function over a dict of weights.

Shapes: B batch, S sequence (queries), T sequence (keys), E embed, H heads, D head_dim, F mlp,
V vocab, L layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lmlib.data.batch import Batch
from step_peers.lmlib_step import planned_peak, used_peak
from step_peers.work import Work

Arrays = dict[str, jax.Array]
OF_LAYERS = (
    "attention_norm", "query", "key", "value", "output", "mlp_norm", "gate", "up", "down",
)  # fmt: skip
EPSILON, ROPE_THETA = 1e-5, 10_000.0


def norm(x_BSE: jax.Array, scale_E: jax.Array) -> jax.Array:
    wide_BSE = x_BSE.astype(jnp.float32)
    mean_square_BS1 = jnp.mean(jnp.square(wide_BSE), -1, keepdims=True)
    return (wide_BSE * jax.lax.rsqrt(mean_square_BS1 + EPSILON)).astype(x_BSE.dtype) * scale_E


def rotate(x_BSHD: jax.Array) -> jax.Array:
    S, D = x_BSHD.shape[1], x_BSHD.shape[3]
    angle_SD = jnp.arange(S)[:, None] * ROPE_THETA ** (-jnp.arange(0, D, 2) / D)
    cos_S1D, sin_S1D = jnp.cos(angle_SD)[:, None], jnp.sin(angle_SD)[:, None]
    first, second = jnp.split(x_BSHD.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos_S1D - second * sin_S1D, second * cos_S1D + first * sin_S1D)
    return jnp.concatenate(turned, axis=-1).astype(x_BSHD.dtype)


def attend(q_BSHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
    S, D = q_BSHD.shape[1], q_BSHD.shape[3]
    scores_BHST = jnp.einsum("bshd,bthd->bhst", q_BSHD, k_BTHD, preferred_element_type=jnp.float32)
    causal_ST = jnp.tril(jnp.ones((S, S), bool))
    weights_BHST = jax.nn.softmax(jnp.where(causal_ST, scores_BHST * D**-0.5, -jnp.inf))
    return jnp.einsum("bhst,bthd->bshd", weights_BHST.astype(v_BTHD.dtype), v_BTHD)


def layer(x_BSE: jax.Array, w: Arrays) -> jax.Array:
    h_BSE = norm(x_BSE, w["attention_norm"])
    q, k, v = (jnp.einsum("bse,ehd->bshd", h_BSE, w[name]) for name in ("query", "key", "value"))
    mixed_BSHD = attend(rotate(q), rotate(k), v)
    x_BSE = x_BSE + jnp.einsum("bshd,hde->bse", mixed_BSHD, w["output"])
    h_BSE = norm(x_BSE, w["mlp_norm"])
    return x_BSE + (jax.nn.silu(h_BSE @ w["gate"]) * (h_BSE @ w["up"])) @ w["down"]


def mean_loss(weights: Arrays, batch: Batch, precision: str, recomputed: bool) -> jax.Array:
    perhaps_again = jax.checkpoint if recomputed else lambda function: function
    narrow = {name: weight.astype(precision) for name, weight in weights.items()}

    @perhaps_again
    def one(x_BSE: jax.Array, of_layer: Arrays) -> tuple[jax.Array, None]:
        return layer(x_BSE, of_layer), None

    @perhaps_again
    def tail(x_BSE: jax.Array) -> jax.Array:
        h_BSE = norm(x_BSE, narrow["norm"])
        logits_BSV = jnp.einsum(
            "bse,ev->bsv", h_BSE, narrow["unembedding"], preferred_element_type=jnp.float32
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, batch.targets).mean()

    x_BSE = narrow["embedding"][batch.tokens]
    x_BSE, _ = jax.lax.scan(one, x_BSE, {name: narrow[name] for name in OF_LAYERS})
    return tail(x_BSE)


class BareJaxStep:
    """The bare JAX step as a `step_peers.work.Contender`."""

    def __init__(self, work: Work):
        adamw = work.size.adamw
        optimizer = optax.chain(
            optax.clip_by_global_norm(adamw.clip_norm),
            optax.adamw(
                adamw.learning_rate,
                adamw.b1,
                adamw.b2,
                adamw.epsilon,
                weight_decay=adamw.weight_decay,
                mask=lambda tree: {name: not name.endswith("norm") for name in tree},
            ),
        )
        loss = functools.partial(
            mean_loss, precision=work.precision, recomputed=work.size.recomputed
        )

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
            weights, moments = state
            value, gradients = jax.value_and_grad(loss)(weights, batch)
            updates, moments = optimizer.update(gradients, moments, weights)
            return (optax.apply_updates(weights, updates), moments), value

        weights = {name: jnp.array(weight) for name, weight in work.weights.items()}
        self._state = (weights, jax.jit(optimizer.init)(weights))
        self._batches = jax.device_put(work.batches)
        self._step = step.lower(self._state, self._batches[0]).compile()

    def run(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self._state, loss = self._step(self._state, self._batches[step])
            losses.append(loss)
        jax.block_until_ready(self._state)
        return [float(loss) for loss in losses]

    def planned_bytes(self) -> int | None:
        return planned_peak(self._step)

    def peak_bytes(self) -> int | None:
        return used_peak()
