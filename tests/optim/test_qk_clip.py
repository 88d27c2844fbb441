"""QK-clip against logits in float64 NumPy: no head keeps larger ones, on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outsider_runs import SIZES, check_outsider, compiled, experiment, momentum

from lmlib.adapters.lora import lora
from lmlib.models.block import Block
from lmlib.models.families.llama import llama
from lmlib.models.measured_block import largest_logits, measured_block
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.latent_attention import LatentAttention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.optim.matrices.muon import muon
from lmlib.optim.qk_clip import qk_clip
from lmlib.optim.trainable import Group

DEVICE = {"devices": jax.devices()[:1]}
MEASURED = functools.partial(llama, **SIZES, layers=2, heads=4, mlp=16, layer=measured_block)


def test_largest_logits_are_those_of_visible_pairs_in_float64():
    random = np.random.default_rng(0)
    q, k = random.normal(size=(2, 512, 4, 8)), random.normal(size=(2, 512, 2, 8))
    segments = np.repeat([[1, 2, 0], [1, 1, 3]], [200, 212, 100], axis=1)
    found = largest_logits(
        *(jnp.asarray(x, jnp.float32) for x in (q, k)), jnp.asarray(segments), 64
    )
    i, j = np.arange(512)[:, None], np.arange(512)
    same = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, :, None]
    seen = ((j <= i) & (i - j < 64))[None] & same
    for head in range(4):
        logits = q[:, :, head] @ np.swapaxes(k[:, :, head // 2], 1, 2) / np.sqrt(8)
        np.testing.assert_allclose(found[head], np.max(logits[seen]), rtol=1e-6)


def run_of(threshold, mesh, optimizer=momentum, **settings):
    clip = functools.partial(qk_clip, optimizer=optimizer, threshold=threshold)
    return experiment(functools.partial(MEASURED, **settings), mesh, optimizer=clip)


def factors(threshold, kv_heads):
    """The factors of queries and keys of each head in one step, and its largest logits."""
    run = run_of(threshold, DEVICE, lambda steps: momentum(steps), kv_heads=kv_heads)
    begun, kept = run.initial_state(), run_of(1e9, DEVICE, kv_heads=kv_heads)
    same = kept.initial_state(jax.tree.map(jnp.copy, begun.model))
    batch = jax.tree.map(jnp.asarray, run.data.batch(0))
    number = run.training.hyperparameters
    state, metrics = compiled(run)(begun, batch, number)
    plain, _ = compiled(kept)(same, batch, kept.training.hyperparameters)
    of = []
    for name in ("query", "key"):
        ours, theirs = (
            getattr(s.model.stack.patterns[0][0].attention, name) for s in (state, plain)
        )
        ratio = np.asarray(ours, np.float64) / np.asarray(theirs, np.float64)
        of.append(np.median(ratio, axis=(1, 3)))
        np.testing.assert_allclose(ratio, of[-1][:, None, :, None] + 0 * ratio, rtol=1e-4)
    return of, float(metrics["largest_attention_logit"])


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["own_keys", "shared_keys"])
def test_heads_above_the_threshold_are_scaled_to_it_and_the_others_stay(kv_heads):
    (queries, keys), largest = factors(1e9, kv_heads)
    assert np.all(queries == 1) and np.all(keys == 1)
    (queries, keys), _ = factors(largest, kv_heads)
    assert 0 < np.sum(queries < 1) < queries.size  # the mean over layers of their largest logit
    if kv_heads == 4:
        np.testing.assert_allclose(queries, keys, rtol=1e-4)
    else:
        assert np.all(keys == 1)
    # The next step has the logits of the clipped weights, since the rate is almost 0.
    still = functools.partial(muon, peak_lr=1e-12, weight_decay=0.0)
    run = run_of(0.5, DEVICE, still, kv_heads=kv_heads, layers=1)
    step, state = compiled(run), run.initial_state()
    batch, found = jax.tree.map(jnp.asarray, run.data.batch(0)), []
    for _ in range(3):
        state, metrics = step(state, batch, run.training.hyperparameters)
        found.append(float(metrics["largest_attention_logit"]))
    assert found[0] > 2
    np.testing.assert_allclose(found[1:], 0.5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_it_trains_as_on_one_device_with_microbatches_and_resumes(mesh, tmp_path):
    run, alone = (run_of(0.01, each, kv_heads=4) for each in (mesh, DEVICE))
    run = experiment(run.model, mesh, optimizer=run.optimizer, microbatches=2)
    metrics, _ = check_outsider(run, alone, tmp_path, rtol=2e-4)
    assert metrics[0]["largest_attention_logit"] > 0.01


def test_attention_that_cannot_be_clipped_is_refused():
    def latent(key):
        attention = LatentAttention(32, 2, 8, 4, 8, 8, None, None, key=key)
        return measured_block(Block(attention, GatedMLP(32, 16, key=key)), key=key)

    with pytest.raises(ValueError, match=r"logits of .*LatentAttention cannot be clipped"):
        jax.eval_shape(latent, jax.random.key(0))
    attention = functools.partial(Attention, norm=functools.partial(RMSNorm, "head_dim", 1e-6))
    with pytest.raises(ValueError, match="queries or keys are normed"):
        jax.eval_shape(functools.partial(MEASURED, attention=attention), key=jax.random.key(0))


def test_other_models_and_meshes_are_refused():
    clip = functools.partial(qk_clip, optimizer=momentum)
    plain = functools.partial(llama, **SIZES, layers=2, heads=4, mlp=16)
    with pytest.raises(ValueError, match="layer=lmlib"):
        experiment(plain, DEVICE, optimizer=clip).abstract_state()
    with pytest.raises(ValueError, match="frozen or have adapters"):
        experiment(functools.partial(lora, MEASURED, 2), DEVICE, optimizer=clip).abstract_state()
    frozen = {"some": Group(paths=("*mlp*",))}
    with pytest.raises(ValueError, match="frozen or have adapters"):
        experiment(MEASURED, DEVICE, optimizer=clip, trainable=frozen).abstract_state()
    with pytest.raises(ValueError, match="threshold must be a positive number"):
        qk_clip(1, momentum, threshold=0.0)


@pytest.mark.several_devices
def test_stages_are_refused():
    with pytest.raises(ValueError, match="stage=1"):
        run_of(1.0, {"stage": 2}).trace_step()
