"""Heads of multi-token prediction (DeepSeek-V3, §2.2), made of layers of transformers' decoder.

The matrix multiplies the normed embedding and then the normed features, and the features of a head
have its last norm. So do `MtpLayer` of transformers, and deepseek_nextn.py and qwen3_next_mtp.py of
SGLang. In vLLM, deepseek_mtp.py and qwen3_next_mtp.py have the same order, but the former norms
DeepSeek's features for the logits only: another model from the second head on.

Needs lmlib[parity].
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import golden_by_transformers as golden
import numpy as np
import torch
from safetensors.torch import load_file, save_file

NAMES = {  # of the norms of embedding and features, the matrix, the last norm
    "deepseek_v3": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen3_next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}


class Heads:
    """The model in a folder, with heads of these prefixes; `to` becomes a folder of all layers."""

    def __init__(self, folder: Path, prefixes: Sequence[str], to: Path):
        content = json.loads((folder / "config.json").read_text())
        held = {n: x for each in folder.glob("*.safetensors") for n, x in load_file(each).items()}
        self.layers, names = content["num_hidden_layers"], NAMES[content["model_type"]]
        self.own = [[f"{prefix}{name}.weight" for name in names] for prefix in prefixes]
        self.weights = {n: torch.nn.Parameter(held[n]) for each in self.own for n in each}
        self.renamed = "mtp.layers.0.", f"model.layers.{self.layers}."
        content["num_hidden_layers"] += len(prefixes)
        if "layer_types" in content:
            content["layer_types"].append("full_attention")
        to.mkdir()
        save_file({n.replace(*self.renamed): x for n, x in held.items()}, to / "model.safetensors")
        (to / "config.json").write_text(json.dumps(content))
        self.whole = golden.loaded(to, "float32")
        self.whole.config.num_hidden_layers = self.layers  # as many as `whole.model` runs

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        made = type(self.whole.model.norm)(x.shape[-1], eps=self.whole.config.rms_norm_eps)
        made.weight = self.weights[name]
        return made(x)

    def logits(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        """Yields the logits of each depth from 1 on, at the first `length` positions."""
        model, positions = self.whole.model, torch.arange(length)[None]
        h = model(ids[:, :length]).last_hidden_state
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        for depth, (of_embedding, of_features, matrix, last) in enumerate(self.own, 1):
            e = model.embed_tokens(ids[:, depth : depth + length])
            both = torch.cat([self.norm(of_embedding, e), self.norm(of_features, h)], dim=-1)
            h = model.layers[self.layers + depth - 1](
                both @ self.weights[matrix].T, attention_mask=mask, position_ids=positions,
                position_embeddings=model.rotary_emb(h, positions),
            )  # fmt: skip
            h = self.norm(last, h)
            yield self.whole.lm_head(h)

    def gradients(self) -> dict[str, np.ndarray]:
        """By the names of tensors in the folder."""
        self.whole.config.num_hidden_layers = len(self.whole.model.layers)
        every = dict(self.whole.named_parameters()) | golden.kept_buffers(self.whole)
        found = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in every.items()}
        saved = golden.as_saved(self.whole, found)
        if self.own[0][0].startswith("mtp."):
            saved = {n.replace(*self.renamed[::-1]): x for n, x in saved.items()}
        saved |= {name: weight.grad for name, weight in self.weights.items()}
        return {name: x.numpy() for name, x in saved.items()}
