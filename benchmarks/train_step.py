"""Speed of the training step on this machine, beside the same math without lmlib.

    python benchmarks/train_step.py

The peer is a bare JAX step: one jitted function over a dict of weights, no mesh, no annotations, no
donation of anything but its state. Same shapes, same precision, same full rematerialisation, same
optimizer; the two take turns, so that a busy machine slows both.
"""

import functools
import time

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from lmlib import optim, train
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.models.attention import attend, rotate
from lmlib.models.llama import Llama
from lmlib.parallel.layout import partition
from lmlib.parallel.mesh import make_mesh

V, E, L, H, F, B, S = 8_192, 256, 4, 4, 1_024, 4, 256
D = E // H
ROUNDS, STEPS = 6, 5


def lmlib_step():
    mesh = make_mesh()
    make = functools.partial(
        Llama, vocab=V, embed=E, layers=L, heads=H, mlp=F, compute_dtype="float32",
        key=jax.random.key(0),
    )  # fmt: skip
    optimizer = optim.adamw(1_000, 1e-3)
    state = train.init(make, optimizer, mesh)
    compiled = train.compile_step(state, train.abstract_batch(B, S, mesh), optimizer, mesh)
    rows = NamedSharding(mesh, partition("batch seq"))
    return compiled, state, place(Synthetic(V, B, S), 0, rows)


def bare_step():
    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale

    def layer(x, w, batch):
        h = norm(x, w["norm_1"])
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in "qkv")
        q, k = (rotate(each, batch.positions, 1e4) for each in (q, k))
        mixed = attend(q, k, v, batch.segment_ids)
        x = x + jnp.einsum("bshd,hde->bse", mixed, w["o"])
        h = norm(x, w["norm_2"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]

    def loss(weights, batch):
        x = weights["embedding"][batch.tokens]
        one = jax.checkpoint(lambda x, w: (layer(x, w, batch), None))
        x, _ = jax.lax.scan(one, x, weights["layers"])

        @jax.checkpoint
        def tail(x):
            logits = norm(x, weights["norm"]) @ weights["unembedding"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            return jnp.sum(losses * batch.loss_mask) / jnp.sum(batch.loss_mask)

        return tail(x)

    shapes = {
        "q": (E, H, D), "k": (E, H, D), "v": (E, H, D), "o": (H, D, E),
        "gate": (E, F), "up": (E, F), "down": (F, E),
    }  # fmt: skip
    normal = functools.partial(jax.random.normal, jax.random.key(0))
    layers = {name: normal((L, *shape)) * E**-0.5 for name, shape in shapes.items()}
    layers |= {"norm_1": jnp.ones((L, E)), "norm_2": jnp.ones((L, E))}
    weights = {
        "embedding": normal((V, E)) * E**-0.5,
        "unembedding": normal((E, V)) * E**-0.5,
        "norm": jnp.ones(E),
        "layers": layers,
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1)
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        weights, moments = state
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), {"loss": value}

    batch = jax.tree.map(jnp.asarray, Synthetic(V, B, S).batch(0))
    state = (weights, optimizer.init(weights))
    return step.lower(state, batch).compile(), state, batch


def main() -> None:
    peers = {"lmlib": lmlib_step(), "bare JAX": bare_step()}
    states = {name: state for name, (_, state, _) in peers.items()}
    cpu = dict.fromkeys(peers, 0.0)
    wall = dict.fromkeys(peers, 0.0)
    for turn in range(ROUNDS + 1):
        for name, (step, _, batch) in peers.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                states[name], metrics = step(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            if turn:  # the first turn warms up
                wall[name] += time.perf_counter() - began
                cpu[name] += time.process_time() - cpu_began
        print(f"turn {turn} of {ROUNDS}", flush=True)
    tokens = ROUNDS * STEPS * B * S
    print(f"{8.4} M parameters, batch {B} x {S}, float32, full rematerialisation")
    for name in peers:
        print(
            f"{name:<10} {tokens / cpu[name]:8,.0f} tokens per CPU-second "
            f"{tokens / wall[name]:8,.0f} tokens per second"
        )
    print(f"lmlib / bare JAX: {cpu['bare JAX'] / cpu['lmlib']:.3f} tokens per CPU-second")


if __name__ == "__main__":
    main()
