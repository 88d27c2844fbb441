"""Folders of adapters, made by PEFT; needs lmlib[parity]."""

from pathlib import Path
from typing import Any

import peft
import torch
from golden_by_transformers import loaded, logits_of_prompt
from hugging_face_families import GOLDEN
from peft.utils.other import get_pattern_key as get_pattern_key
from safetensors.torch import save_file

PEFT_VERSION = peft.__version__


def adapted(name: str, **settings: Any) -> Any:
    """Returns the golden model `name` with random adapters and changed trainable weights."""
    torch.manual_seed(0)
    model = loaded(GOLDEN / name, "float32")
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.requires_grad and "lora_" not in path:
                weight += 0.3 * torch.randn_like(weight)
    return model


def read(name: str, folder: Path) -> Any:
    """The golden model `name` with the adapters that PEFT reads in `folder`."""
    return peft.PeftModel.from_pretrained(loaded(GOLDEN / name, "float32"), folder).eval()


def write(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """A golden folder of adapters, with the logits of the prompt."""
    model = adapted(name, **settings)
    model.peft_config["default"].base_model_name_or_path = f"golden/{name}"
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    logits = logits_of_prompt(model, model.config.vocab_size)
    save_file({"logits": logits}, folder / "expected.safetensors")
