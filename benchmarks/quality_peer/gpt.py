"""A plain GPT in compiled PyTorch, trained for so many CPU-seconds.

Shapes: B batch, S sequence, E embed, H heads, D head_dim, V vocab.
"""

import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lmlib.data.batch import Batch
from lmlib.data.flat_tokens import FlatTokens
from lmlib.evaluate.validation import bits_per_byte
from quality_peer.trained import Progress, Trained

BETAS, WEIGHT_DECAY, CLIP_NORM = (0.9, 0.95), 0.1, 1.0
WARMUP, END = 0.05, 0.1  # shares of the budget, and of the peak rate
DEVIATION = 0.02  # of initial values
_NO_TARGET = -100  # which PyTorch's loss leaves out


class Shape(NamedTuple):
    vocab: int
    embed: int
    layers: int
    heads: int
    sequence: int


class Block(nn.Module):
    def __init__(self, embed: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(embed)
        self.query_key_value = nn.Linear(embed, 3 * embed)
        self.output = nn.Linear(embed, embed)
        self.mlp_norm = nn.LayerNorm(embed)
        self.up = nn.Linear(embed, 4 * embed)
        self.down = nn.Linear(4 * embed, embed)

    def forward(self, x_BSE: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x_BSE)).chunk(3, dim=-1)
        q_BHSD, k_BHSD, v_BHSD = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        mixed_BHSD = functional.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True)
        x_BSE = x_BSE + self.output(mixed_BHSD.transpose(1, 2).flatten(2))
        return x_BSE + self.down(functional.gelu(self.up(self.mlp_norm(x_BSE))))


class GPT(nn.Module):
    """Tokens and targets to the sum of the losses, in nats."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.embed)
        self.position = nn.Embedding(shape.sequence, shape.embed)
        self.blocks = nn.ModuleList(Block(shape.embed, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.embed)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                deep = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(weight, std=DEVIATION / math.sqrt(2 * shape.layers if deep else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        x_BSE = self.embedding(tokens_BS) + self.position.weight[: tokens_BS.shape[1]]
        for block in self.blocks:
            x_BSE = block(x_BSE)
        logits_BSV = functional.linear(self.norm(x_BSE), self.embedding.weight)
        return functional.cross_entropy(
            logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=_NO_TARGET, reduction="sum"
        )


def train_gpt(
    shape: Shape,
    data: FlatTokens,
    validation: FlatTokens,
    cpu_seconds: float,
    peak_lr: float,
    seed: int,
) -> Trained:
    """Makes steps until `cpu_seconds` of all threads are spent, then evaluates."""
    torch.manual_seed(seed)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = GPT(shape)
    loss_of = torch.compile(model, fullgraph=True, dynamic=False)
    optimizer = _adamw(model)
    loss_of(*_tensors(data.batch(0))[:2]).backward()  # compiles
    optimizer.zero_grad(set_to_none=True)
    progress = Progress(f"seed {seed}: GPT at {peak_lr:g}")
    begun, spent, step = time.process_time(), 0.0, 0
    while spent < cpu_seconds:
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * rate(spent / cpu_seconds)
        tokens_BS, targets_BS, count = _tensors(data.batch(step))
        (loss_of(tokens_BS, targets_BS) / max(count, 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, spent = step + 1, time.process_time() - begun
        progress.tell(spent / cpu_seconds, step)
    assert validation.bytes_per_target is not None
    return Trained(
        bits_per_byte=bits_per_byte(_nats(loss_of, validation), validation.bytes_per_target),
        steps=step,
        cpu_seconds=spent,
        parameters=sum(weight.numel() for weight in model.parameters()),
    )


def rate(share: float) -> float:
    """The share of the peak learning rate when so much of the budget is spent: a warm-up, then half
    a cosine, to `END`."""
    if share < WARMUP:
        return (share + 0.001) / (WARMUP + 0.001)
    done = min(1.0, (share - WARMUP) / (1 - WARMUP))
    return END + (1 - END) * (1 + math.cos(math.pi * done)) / 2


def _adamw(model: GPT) -> torch.optim.AdamW:
    weights = list(model.parameters())
    groups = [
        {"params": [each for each in weights if each.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in weights if each.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


@torch.no_grad()
def _nats(loss_of: Callable[..., Tensor], validation: FlatTokens) -> float:
    """The mean over the targets of the whole split."""
    assert validation.batches is not None
    total, targets = 0.0, 0
    for number in range(validation.batches):
        tokens_BS, targets_BS, count = _tensors(validation.batch(number))
        total += loss_of(tokens_BS, targets_BS).item()
        targets += count
    return total / targets


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Tokens, targets, and how many of these count."""
    targets_BS = np.where(batch.loss_mask, batch.targets, _NO_TARGET).astype(np.int64)
    tokens_BS = torch.from_numpy(np.asarray(batch.tokens, np.int64))
    return tokens_BS, torch.from_numpy(targets_BS), int(batch.loss_mask.sum())
