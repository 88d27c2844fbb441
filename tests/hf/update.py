"""Makes the golden folders again, with lmlib[parity] installed:

PYTHONPATH=tests/shared python tests/hf/update.py [NAME …]
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hugging_face_families import ADAMW, FAMILIES, KEPT, LENGTH, PROMPT, ROWS
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent / "golden"


def tokens(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A long prompt, and a batch with the token after each row."""
    random = np.random.default_rng(0)
    return random.integers(0, vocab, (1, PROMPT)), random.integers(0, vocab, (ROWS, LENGTH + 1))


def random_model(kind: str, keys: dict[str, Any]) -> Any:
    """With weights that leave nothing out: no bias at zero, no scale at one."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1).add_(0.1 * torch.randn_like(weight))
    return model.float().eval()


def write(folder: Path, kind: str, keys: dict[str, Any]) -> None:
    model = random_model(kind, keys)
    model.save_pretrained(folder)
    prompt, batch = tokens(keys["vocab_size"])
    with torch.no_grad():
        logits = model(torch.tensor(prompt)).logits[0, KEPT]
    output = model(torch.tensor(batch[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(
        output.flatten(0, 1), torch.tensor(batch[:, 1:]).flatten()
    )
    loss.backward()
    names = dict(model.named_parameters())
    gradients = {name: weight.grad.contiguous() for name, weight in names.items()}
    decaying = [weight for weight in names.values() if weight.ndim > 1]
    others = [weight for weight in names.values() if weight.ndim == 1]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, **ADAMW).step()
    after = {name: weight.detach().contiguous() for name, weight in names.items()}
    save_file(gradients, folder / "gradients.safetensors")
    save_file(after, folder / "after.safetensors")
    save_file(
        {"logits": logits.contiguous(), "loss": loss.detach()}, folder / "expected.safetensors"
    )


def main(chosen: list[str]) -> None:
    for name, (kind, keys) in FAMILIES.items():
        if not chosen or name in chosen:
            write(GOLDEN / name, kind, keys)


if __name__ == "__main__":
    main(sys.argv[1:])
