"""The training step of Mixtral as transformers has it: eager, SDPA, fused AdamW, float32."""

import tempfile

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import MixtralForCausalLM

from lmlib import hf
from step_peers.contender import Work
from step_peers.pytorch_peer import fused_adamw


class TransformersMixture:
    """See `step_peers.contender.Contender`. Its weights are lmlib's, through a folder in Hugging
    Face's form. Experts are computed one after another, or as transformers chooses by itself if
    `experts` is `None`."""

    def __init__(self, work: Work, experts: str | None):
        torch.set_num_threads(2)
        with tempfile.TemporaryDirectory() as folder:
            hf.save(jax.jit(work.size.make_model)(), f"{folder}/model", dtype="float32")
            self._model = MixtralForCausalLM.from_pretrained(
                f"{folder}/model", dtype=torch.float32, experts_implementation=experts
            )
        self._weights, self._clip_norm = list(self._model.parameters()), work.adamw.clip_norm
        self._optimizer = fused_adamw(self._weights, work.adamw)
        self._batches = [
            [torch.from_numpy(np.asarray(x, np.int64)) for x in (batch.tokens, batch.targets)]
            for batch in work.batches
        ]

    def run(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens_BS, targets_BS = self._batches[step]
            logits_BSV = self._model(tokens_BS, use_cache=False).logits
            loss = functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self._weights, self._clip_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        return losses

    def peak_bytes(self) -> int | None:
        return None
