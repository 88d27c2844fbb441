"""The same training step in PyTorch, with SDPA and fused AdamW; also transformers' Mixtral.

Precision is as in lmlib: weights, gradients and moments are float32. In bfloat16, each weight is
cast where it is used, and activations are bfloat16, including the residual stream and the logits'
matmul. (Autocast would keep the residual stream in float32.) Routers compute in float32.
Shapes: B batch, S sequence, E embed, H heads, K kv_heads, D head_dim, F mlp, V vocab, N tokens,
X experts, T choices of a token, C choices of all tokens.
"""

import functools
import tempfile
from collections.abc import Callable

import jax
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lmlib import hf
from step_peers.work import AdamW, Weights, Work

EPSILON = 1e-5


def parameter(values: np.ndarray) -> nn.Parameter:
    return nn.Parameter(torch.tensor(np.asarray(values, np.float32)))


class Linear(nn.Module):
    """x Wᵀ for the weight W of shape (out, in), PyTorch's own order."""

    def __init__(self, weight_IO: np.ndarray):
        super().__init__()
        self.weight = parameter(weight_IO.T)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, scale_E: np.ndarray):
        super().__init__()
        self.weight = parameter(scale_E)

    def forward(self, x_BSE: Tensor) -> Tensor:
        wide_BSE = x_BSE.float()
        unit_BSE = functional.rms_norm(wide_BSE, self.weight.shape, eps=EPSILON)
        return unit_BSE.to(x_BSE.dtype) * self.weight.to(x_BSE.dtype)


class Attention(nn.Module):
    def __init__(self, of_layer: Weights):
        super().__init__()
        E = of_layer["query"].shape[0]
        self.head_dim = of_layer["query"].shape[-1]
        self.query, self.key, self.value = (
            Linear(of_layer[name].reshape(E, -1)) for name in ("query", "key", "value")
        )
        self.output = Linear(of_layer["output"].reshape(-1, E))

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q_BHSD, k_BKSD, v_BKSD = (
            project(x_BSE).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q_BHSD, k_BKSD = rotate(q_BHSD, cos_SD, sin_SD), rotate(k_BKSD, cos_SD, sin_SD)
        mixed_BHSD = functional.scaled_dot_product_attention(
            q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=q_BHSD.shape[1] != k_BKSD.shape[1]
        )
        return self.output(mixed_BHSD.transpose(1, 2).flatten(2))


def rotate(x_BHSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    first, second = x_BHSD.float().chunk(2, dim=-1)
    turned = (first * cos_SD - second * sin_SD, second * cos_SD + first * sin_SD)
    return torch.cat(turned, dim=-1).to(x_BHSD.dtype)


class MLP(nn.Module):
    def __init__(self, of_layer: Weights):
        super().__init__()
        self.gate, self.up, self.down = (Linear(of_layer[name]) for name in ("gate", "up", "down"))

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x_BSE)) * self.up(x_BSE))


class Experts(nn.Module):
    """Mixtral's layer: rows sorted by expert, three grouped matmuls, and a sum by token."""

    def __init__(self, of_layer: Weights, top: int):
        super().__init__()
        self.router, self.top = Linear(of_layer["router"]), top
        self.gate, self.up, self.down = (
            parameter(of_layer[name]) for name in ("gate", "up", "down")
        )

    def forward(self, x_BSE: Tensor) -> Tensor:
        x_NE = x_BSE.flatten(0, 1)
        logits_NT, expert_NT = self.router(x_NE.float()).topk(self.top, dim=-1)
        share_C = logits_NT.softmax(dim=-1).flatten()
        expert_C, order_C = expert_NT.flatten().sort(stable=True)
        token_C = order_C // self.top
        is_of_CX = expert_C[:, None] == torch.arange(len(self.gate), device=x_NE.device)
        ends_X = is_of_CX.sum(dim=0).cumsum(dim=0).to(torch.int32)

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            return functional.grouped_mm(rows, weight.to(rows.dtype), offs=ends_X)

        rows_CE = x_NE[token_C]
        hidden_CF = functional.silu(product(rows_CE, self.gate)) * product(rows_CE, self.up)
        hidden_CF = (hidden_CF * share_C[order_C, None]).to(x_NE.dtype)
        y_CE = product(hidden_CF, self.down)
        return torch.zeros_like(x_NE).index_add(0, token_C, y_CE).view_as(x_BSE)


class Block(nn.Module):
    def __init__(self, of_layer: Weights, top: int | None):
        super().__init__()
        self.attention_norm = RMSNorm(of_layer["attention_norm"])
        self.attention = Attention(of_layer)
        self.mlp_norm = RMSNorm(of_layer["mlp_norm"])
        self.mlp = MLP(of_layer) if top is None else Experts(of_layer, top)

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        x_BSE = x_BSE + self.attention(self.attention_norm(x_BSE), cos_SD, sin_SD)
        return x_BSE + self.mlp(self.mlp_norm(x_BSE))


class Decoder(nn.Module):
    """A Llama or Mixtral that maps tokens and targets to the mean loss, in nats per token."""

    def __init__(self, work: Work):
        super().__init__()
        weights, size = work.weights, work.size
        whole = ("embedding", "unembedding", "norm")
        of_layers = {name: stack for name, stack in weights.items() if name not in whole}
        layers, top = len(of_layers["gate"]), size.settings.get("top")
        self.embedding = parameter(weights["embedding"])
        self.blocks = nn.ModuleList(
            Block({name: stack[index] for name, stack in of_layers.items()}, top)
            for index in range(layers)
        )
        self.norm = RMSNorm(weights["norm"])
        self.unembedding = Linear(weights["unembedding"])
        self.precision = getattr(torch, work.precision)
        again = functools.partial(checkpoint, use_reentrant=False)
        self.again = again if size.recomputed else _once
        D = self.blocks[0].attention.head_dim
        angle_SD = np.arange(size.sequence)[:, None] * size.rope_theta ** (-np.arange(0, D, 2) / D)
        self.register_buffer("cos_SD", torch.from_numpy(np.cos(angle_SD)).float())
        self.register_buffer("sin_SD", torch.from_numpy(np.sin(angle_SD)).float())

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        x_BSE = functional.embedding(tokens_BS, self.embedding).to(self.precision)
        for block in self.blocks:
            x_BSE = self.again(block, x_BSE, self.cos_SD, self.sin_SD)
        return self.again(self.tail, x_BSE, targets_BS)

    def tail(self, x_BSE: Tensor, targets_BS: Tensor) -> Tensor:
        logits_BSV = self.unembedding(self.norm(x_BSE)).float()
        return functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def _once(function, *arguments):
    return function(*arguments)


def fused_adamw(weights: list[nn.Parameter], adamw: AdamW) -> torch.optim.AdamW:
    """Makes the optimizer, with weight decay for matrices only."""
    matrices = [weight for weight in weights if weight.ndim > 1]
    vectors = [weight for weight in weights if weight.ndim == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": adamw.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=adamw.learning_rate,
        betas=(adamw.b1, adamw.b2),
        eps=adamw.epsilon,
        fused=True,
    )


class TorchStep:
    """A PyTorch step as a `step_peers.work.Contender`. Runs on the GPU if PyTorch finds one."""

    def __init__(self, work: Work, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]):
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(2)
        else:
            torch.cuda.reset_peak_memory_stats()
        self._loss, self._weights = loss, list(model.to(self._device).parameters())
        self._clip_norm = work.size.adamw.clip_norm
        self._optimizer = fused_adamw(self._weights, work.size.adamw)
        self._batches = [
            [
                torch.from_numpy(np.asarray(part, np.int64)).to(self._device)
                for part in (batch.tokens, batch.targets)
            ]
            for batch in work.batches
        ]

    def run(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = self._loss(*self._batches[step])
            loss.backward()
            nn.utils.clip_grad_norm_(self._weights, self._clip_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return [loss.item() for loss in losses]

    def planned_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None


def decoder_step(work: Work, compiled: bool) -> TorchStep:
    model = Decoder(work)
    loss = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    return TorchStep(work, model, loss)


def mixtral_step(work: Work, experts: str) -> TorchStep:
    """Returns a step of transformers' Mixtral in float32, with lmlib's weights through a folder."""
    from transformers import MixtralForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        hf.save(jax.jit(work.size.make_model)(), f"{folder}/model", dtype="float32")
        model = MixtralForCausalLM.from_pretrained(
            f"{folder}/model", dtype=torch.float32, experts_implementation=experts
        )

    def loss(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        logits_BSV = model(tokens_BS, use_cache=False).logits
        return functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())

    return TorchStep(work, model, loss)
