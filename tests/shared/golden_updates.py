"""Writes golden_updates.json: weights after ten updates by published optimizers, in float32.

pip install schedulefree==1.4.1 pytorch-optimizer==4.1.0 torchao==0.18.0 torch
TORCHDYNAMO_DISABLE=1 python tests/shared/golden_updates.py
"""

import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".json")
UPDATES, RATE, DECAY = 10, 0.01, 0.1
SMALL, LARGE = (6, 10), (64, 96)
WARMUP = 3  # updates of schedule-free AdamW at lower rates
TILE = 16
EVERY = 61  # of the larger weights the file has each 61st


def drawn(shape):
    """The weights, and the gradients of each update, of very different sizes."""
    random = np.random.default_rng(0)
    weights = 0.1 * random.normal(size=shape)
    sizes = np.exp(random.normal(size=shape))
    gradients = random.normal(size=(UPDATES, *shape)) * sizes
    return weights.astype(np.float32), gradients.astype(np.float32)


def in_blocks(x):
    """The elements in the order of their blocks of TILE · TILE."""
    rows, columns = (size // TILE for size in x.shape)
    return x.reshape(rows, TILE, columns, TILE).transpose(0, 2, 1, 3).reshape(-1)


def of_blocks(x, shape):
    rows, columns = (size // TILE for size in shape)
    return x.reshape(rows, columns, TILE, TILE).transpose(0, 2, 1, 3).reshape(shape)


def main():
    import torch
    from pytorch_optimizer import AdEMAMix
    from schedulefree import AdamWScheduleFree
    from torchao.optim import AdamW8bit

    def updated(make, weights, gradients):
        parameter = torch.nn.Parameter(torch.tensor(weights))
        optimizer = make([parameter])
        getattr(optimizer, "train", lambda: None)()
        for gradient in gradients:
            parameter.grad = torch.tensor(gradient)
            optimizer.step()
        return parameter, optimizer

    def numbers(parameter):
        return parameter.detach().numpy().astype(float)

    common = {"lr": RATE, "weight_decay": DECAY}
    found = {}
    mixed, _ = updated(
        lambda p: AdEMAMix(
            p, betas=(0.9, 0.999, 0.9999), alpha=8.0, t_alpha_beta3=UPDATES,
            weight_decouple=True, **common,
        ),
        *drawn(SMALL),
    )  # fmt: skip
    found["ademamix"] = numbers(mixed)
    free, optimizer = updated(
        lambda p: AdamWScheduleFree(p, betas=(0.9, 0.95), warmup_steps=WARMUP, **common),
        *drawn(SMALL),
    )
    found["schedule_free"] = numbers(free)
    optimizer.eval()
    found["schedule_free_evaluated"] = numbers(free)
    weights, gradients = drawn(LARGE)
    coded, _ = updated(
        lambda p: AdamW8bit(p, betas=(0.9, 0.95), block_size=TILE * TILE, **common),
        in_blocks(weights),
        map(in_blocks, gradients),
    )
    found["adamw_in_eight_bits"] = of_blocks(numbers(coded), LARGE).ravel()[::EVERY]
    rounded = {name: np.round(x, 9).tolist() for name, x in found.items()}
    FILE.write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
