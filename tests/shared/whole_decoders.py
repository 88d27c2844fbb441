"""Checks of whole decoders in float32: PyTorch's gradients, documents of a row, generation.

Shapes: B batch, S sequence, V vocab.
"""

import jax
import jax.numpy as jnp
import laid_out
import numpy as np

from lmlib import Compute, single_document_context
from lmlib.generate import GREEDY, Generator
from lmlib.models.forward_context import ForwardContext

FLOAT32 = Compute(dtype="float32")


def two_documents(rows=2):
    """Documents of 5 and 9 tokens in each row."""
    positions_BS = np.tile(np.concatenate((np.arange(5), np.arange(9))), (rows, 1))
    segments_BS = np.tile(1 + (np.arange(14) >= 5), (rows, 1))
    return ForwardContext(jnp.asarray(positions_BS), jnp.asarray(segments_BS), FLOAT32)


def check_documents(model, tokens_BS, bound):
    found_BSV = jax.jit(lambda model: model(tokens_BS, two_documents()))(model)
    for start, end in ((0, 5), (5, 14)):
        alone_BS = tokens_BS[:, start:end]
        expected_BSV = model(alone_BS, single_document_context(alone_BS, FLOAT32))
        np.testing.assert_allclose(found_BSV[:, start:end], expected_BSV, rtol=bound, atol=bound)


def check_generation(model, mesh, tokens_BS):
    """Prompts in chunks, with padding, and then token by token, past every window."""
    generator = Generator(
        laid_out.laid_out(model, mesh), mesh=mesh, compute=FLOAT32, rows=8, length=32, chunk=8
    )
    prompts = [tokens_BS[0].tolist(), tokens_BS[1][:3].tolist()]
    for prompt, (one,) in zip(prompts, generator(prompts, 12, GREEDY), strict=True):
        row_1S = jnp.asarray([[*prompt, *one.tokens]], jnp.int32)
        logits_SV = model(row_1S, single_document_context(row_1S, FLOAT32))[0]
        expected = np.argmax(logits_SV, axis=-1)[len(prompt) - 1 : -1]
        assert list(one.tokens) == expected.tolist()


def check_gradients(model, tokens_BS, by_pytorch, torch, of_logits, of_gradients):
    """Logits and gradients of `by_pytorch(weights, layers, tokens)`, within two bounds."""
    given = laid_out.as_dict(model, lambda x: torch.tensor(np.asarray(x), requires_grad=True))
    layers = [*laid_out.layers_of(given, model)]
    expected = by_pytorch(given, layers, torch.tensor(np.asarray(tokens_BS)).long())
    weight_BSV = np.random.default_rng(3).normal(size=tuple(expected.shape)).astype(np.float32)
    (expected * torch.tensor(weight_BSV)).sum().backward()

    def total(model):
        logits_BSV = model(tokens_BS, single_document_context(tokens_BS, FLOAT32))
        return jnp.sum(logits_BSV * weight_BSV), logits_BSV

    with jax.default_matmul_precision("highest"):
        gradients, found = jax.jit(jax.grad(total, has_aux=True))(model)
    laid_out.assert_near(found, expected.detach().numpy(), of_logits)
    for path, gradient in laid_out.as_dict(gradients).items():
        expected_gradient = given[path].grad.numpy()
        assert np.any(expected_gradient), path
        laid_out.assert_near(gradient, expected_gradient, of_gradients)
