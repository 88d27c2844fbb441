"""Adapters of experts, and folders with a module for each expert, as PEFT wrote them before."""

import json

import equinox as eqx
import numpy as np
from adapted_models import adapted

from lmlib.hf.tensor_files import begin_files, laid_out, write
from lmlib.models.matrices.lora import map_adapted

ALL_WEIGHTS = ("stack.*", "*.experts.*")
# The module of the experts in a folder, and their matrices: gate, up and down.
EXPERT_TENSORS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def two_ranks(name):
    """Adapters of rank 4 and another alpha in attention, and of rank 2 in the experts."""
    model = adapted(name, rank=2, alpha=5.0, paths=("*.experts.*",))
    attention = adapted(name, rank=4, alpha=8.0, paths=("*.attention.*",))
    return eqx.tree_at(
        lambda model: model.stack.patterns[0][0].attention,
        model,
        attention.stack.patterns[0][0].attention,
    )


def save_tensors(found, file):
    shaped = {name: (each.dtype, each.shape) for name, each in found.items()}
    placed = laid_out(file.parent, shaped, 1 << 40, file.name)
    begin_files(placed)
    for name, values in found.items():
        write(placed[name], 0, values)


def write_expert_modules(folder, name, rank=2):
    """Writes the folder that PEFT wrote with transformers 4; returns the model."""
    model = adapted(name, rank=rank, alpha=5.0, paths=("*.experts.*",))
    module, *matrices = EXPERT_TENSORS[name]
    found = {}

    def note(path, one):
        ending = dict(zip(("gate", "up", "down"), matrices, strict=True))[path.rpartition(".")[2]]
        for layer, (down, up) in enumerate(zip(one.down, one.up, strict=True)):
            for expert, pair in enumerate(zip(down, up, strict=True)):
                at = f"base_model.model.model.layers.{layer}.{module}.experts.{expert}.{ending}"
                for each, values in zip("AB", pair, strict=True):
                    found[f"{at}.lora_{each}.weight"] = np.ascontiguousarray(values.T)
        return one

    map_adapted(note, model)
    folder.mkdir()
    save_tensors(found, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 5.0}
    config["target_modules"] = matrices
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return model
