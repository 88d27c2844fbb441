"""A small model that has learned the texts of `small_tokenizer`, in a folder as Hugging Face's."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from laid_out import drawn
from small_tokenizer import TEXTS, write_tokenizer_folder
from tokenizers import Tokenizer

from lmlib import hf
from lmlib.models.families.llama import llama

LENGTH = 64


def learned(model, tokenizer):
    """`model` after some updates on the sentences."""
    tokenizer.enable_padding(pad_id=0)
    encoded = tokenizer.encode_batch(TEXTS)
    tokens_BS = jnp.asarray(np.array([each.ids for each in encoded], np.int32)[:, :LENGTH])
    mask_BS = np.array([each.attention_mask for each in encoded])[:, 1:LENGTH]
    adam = optax.adam(1e-2)

    def loss(model):
        logits_BSV = model(tokens_BS)[:, :-1]
        nats_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, tokens_BS[:, 1:])
        return (nats_BS * mask_BS).sum() / mask_BS.sum()

    @jax.jit
    def update(model, state):
        updates, state = adam.update(jax.grad(loss)(model), state)
        return optax.apply_updates(model, updates), state

    state = jax.jit(adam.init)(model)
    for _ in range(40):
        model, state = update(model, state)
    return model


def write_taught_model(folder, begins=True, longest=LENGTH, seed=0, template=True):
    """Writes a model with its tokenizer into `folder`, and returns the folder."""
    tokenizer = folder.parent / f"{folder.name}_tokenizer"
    vocab = write_tokenizer_folder(tokenizer, begins=begins)
    if not template:
        config = json.loads((tokenizer / "tokenizer_config.json").read_text())
        del config["chat_template"]
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    make = functools.partial(llama, vocab=vocab, embed=32, layers=2, heads=4, mlp=64)
    model = drawn(jax.eval_shape(make, key=jax.random.key(1)), seed)
    hf.save(
        learned(model, Tokenizer.from_file(str(tokenizer / "tokenizer.json"))),
        folder,
        tokenizer=tokenizer,
        dtype="float32",
        longest=longest,
        settings={"eos_token_id": 0},  # else `hf` goes on after it where its batch does
    )
    return folder
