"""The table of one size in one precision, and the verdict on whether all did the same work."""

import statistics
from collections.abc import Mapping

import jax

from lmlib.metrics.log import mfu
from lmlib.terminal.table import columns
from step_peers.contender import Work
from step_peers.matmul import Matmul
from step_peers.measure import Measurement, Rate, rate
from step_peers.sizes import Size

CHECKED = 20  # steps whose losses must agree

# Largest relative difference of a loss from lmlib's; in these steps it falls by 1e-2 or more. In
# float32 contenders differ by the order of their sums, 6e-8 of each, which training amplifies. A
# bfloat16 is off by up to 4e-3, and contenders round in different places; a loss averages over
# thousands of such errors.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3}


class OtherWork(ValueError):
    """A contender's losses are not lmlib's, so its speed says nothing."""


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference of a loss from its reference; NaN if one is NaN."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return max(differences, key=lambda each: (each != each, each))


def check_same_work(name: str, losses: list[float], reference: list[float], precision: str) -> None:
    """Raises `OtherWork` if the losses of the first steps differ by more than `TOLERANCE`."""
    for step, (loss, expected) in enumerate(zip(losses[:CHECKED], reference, strict=False)):
        # Written so that what is not a number fails.
        if not abs(loss - expected) <= TOLERANCE[precision] * abs(expected):
            raise OtherWork(
                f"{name} does not do lmlib's work: in {precision}, its loss at step {step} is "
                f"{loss:.6f} and lmlib's {expected:.6f}, which differ by more than "
                f"{TOLERANCE[precision]:g} of it"
            )


def table(
    size: Size,
    measurements: Mapping[str, Measurement],
    device: jax.Device,
    matmul: Matmul | None = None,
) -> str:
    """The speed of each, and lmlib's over it. On a CPU per CPU-second, since other processes may
    share the cores, and as the share of XLA's own rate of multiplying, `matmul`; on an accelerator
    per second, and as MFU."""
    on_cpu = matmul is not None
    lmlib = measurements["lmlib"]
    model = jax.eval_shape(size.make_model)
    flops_per_token = [model.flops_per_token(size.sequence, causal) for causal in (True, False)]

    def speed(found: Measurement) -> Rate:
        return rate(size.tokens, found.cpu_seconds if on_cpu else found.wall_seconds)

    head = ["", "tokens per CPU-second" if on_cpu else "tokens per second"]
    head += ["slowest … fastest turn", "lmlib ÷ it"]
    if matmul is None:
        head += ["MFU causal", "MFU whole", "peak GB"]
    else:
        head += ["tokens per second", "of matmul rate, causal", "whole"]
    rows = [[*head, "first loss", "last loss", "largest difference"]]
    for name, found in measurements.items():
        found_speed = speed(found)
        row = [name, f"{found_speed.median:,.0f}"]
        row.append(f"{found_speed.slowest:,.0f} … {found_speed.fastest:,.0f}")
        row.append(f"{speed(lmlib).median / found_speed.median:.3f}")
        if matmul is not None:
            row.append(f"{rate(size.tokens, found.wall_seconds).median:,.0f}")
            peak_flops = statistics.median(matmul.flops_per_cpu_second)
            row += [f"{flops * found_speed.median / peak_flops:.3f}" for flops in flops_per_token]
        else:
            shares = [mfu(flops, found_speed.median, [device]) for flops in flops_per_token]
            row += ["unknown" if share is None else f"{share:.1%}" for share in shares]
            peak = found.peak_bytes
            row.append("unknown" if peak is None else f"{peak / 1e9:.1f}")
        row += [f"{found.losses[0]:.5f}", f"{found.losses[-1]:.5f}"]
        if found.same_data:
            difference = largest_difference(found.losses[:CHECKED], lmlib.losses[:CHECKED])
            row.append(f"{difference:.1e}")
        else:
            row.append("other data")
        rows.append(row)
    return columns(rows)


def title(work: Work) -> str:
    size, settings = work.size, work.size.settings
    weights = jax.tree.leaves(jax.eval_shape(size.make_model))
    kept = "layers computed again in the backward pass" if size.recomputed else "activations kept"
    return (
        f"{size.name}: {sum(weight.size for weight in weights) / 1e6:,.1f} M parameters (embed "
        f"{settings['embed']}, {settings['layers']} layers, {settings['heads']} heads, mlp "
        f"{settings['mlp']}, vocab {settings['vocab']}), {size.batch} × {size.sequence} tokens a "
        f"step, {work.precision}, {kept}{', documents packed' * work.packed}"
    )
