"""What `plan` expects of 1B to 405B parameters on 1 to 4,096 GPUs: the table of docs/scaling.md.

    pip install -e '.[plan-gpu]' && python benchmarks/scaling.py [--sizes=8B] [--devices=64,256]

Every step is compiled for the absent GPUs, in one to a few minutes each, layout by layout until one
fits; nothing is measured. A step has 4.2 M tokens, or 16.8 M on 4,096 GPUs.
"""

from collections.abc import Iterator
from typing import NamedTuple

from absl import app, flags

from lmlib.experiment import Experiment
from lmlib.plan import targets
from lmlib.plan.planner import Report, plan
from runner.absent_hardware.stand_ins import built, without_data
from runner.config import configs
from runner.jax_settings.xla_flags import overlap_communication

_SIZES = flags.DEFINE_list("sizes", None, "of 1B, 8B, 70B, 405B; all by default")
_DEVICES = flags.DEFINE_list("devices", None, "how many GPUs; 1, 8, 64, 256 and 4,096 by default")
_GPU = flags.DEFINE_string("gpu", "h100", "which")

GPUS_OF_A_HOST = 8
SEQUENCE = 8_192
# Llama 3's shapes (Grattafiori et al. 2024, arXiv:2407.21783, table 3; 1B of Llama 3.2).
MODELS = {
    "1B": {"embed": 2_048, "layers": 16, "heads": 32, "head_dim": 64, "mlp": 8_192},
    "8B": {"embed": 4_096, "layers": 32, "heads": 32, "head_dim": 128, "mlp": 14_336},
    "70B": {"embed": 8_192, "layers": 80, "heads": 64, "head_dim": 128, "mlp": 28_672},
    "405B": {"embed": 16_384, "layers": 126, "heads": 128, "head_dim": 128, "mlp": 53_248},
}
NOTHING_SAVED: tuple[str, ...] = ()
KERNELS_SAVED = ("query", "key", "value", "attention")


class Layout(NamedTuple):
    """Sizes of the mesh, sequences of a microbatch on each device, and what is saved."""

    data: int
    fsdp: int
    tensor: int
    sequences: int
    saved: tuple[str, ...]

    def __str__(self) -> str:
        mesh = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        used = [f"{name} {size}" for name, size in mesh.items() if size > 1] or ["one device"]
        kept = "attention kept" if self.saved else "all computed again"
        return f"{' × '.join(used)}, {self.sequences} sequence(s) at a time, {kept}"


def layouts(devices: int, batch: int) -> Iterator[Layout]:
    """Those worth a try, the fastest first: FSDP alone, which sends least for the work it does as
    long as every device has whole sequences; then tensor parallelism within hosts."""
    tensors = [size for size in (1, 2, 4, 8) if devices % size == 0]
    for tensor in tensors:
        shards = devices // tensor
        if batch % shards:
            continue
        # Beyond 512 shards a gather has pieces too small to send well.
        fsdp = min(shards, 512)
        for sequences, saved in ((2, KERNELS_SAVED), (1, KERNELS_SAVED), (1, NOTHING_SAVED)):
            if batch % (shards * sequences) == 0:
                yield Layout(shards // fsdp, fsdp, tensor, sequences, saved)


def experiment(size: str, layout: Layout, batch: int, target: targets.Target) -> Experiment:
    cfg = configs.load("experiments/llama_8b")
    for name, value in MODELS[size].items():
        setattr(cfg.model, name, value)
    cfg.compute.saved = layout.saved
    cfg.compute.sequence_parallel = layout.tensor > 1
    for name in ("data", "fsdp", "tensor"):
        setattr(cfg.mesh, name, getattr(layout, name))
    cfg.data.batch_size = batch
    cfg.microbatches = batch // (layout.data * layout.fsdp * layout.sequences)
    return built(without_data(cfg), target.devices())


def best(size: str, devices: int) -> tuple[Layout, Report] | None:
    """The first layout that fits, and its plan."""
    hosts = max(1, devices // GPUS_OF_A_HOST)
    target = targets.parse(f"{_GPU.value}:{hosts}x{devices // hosts}")
    batch = 2_048 if devices > 1_024 else 512
    targets.prepare(target)
    overlap_communication()
    for layout in layouts(devices, batch):
        if least_bytes(size, devices) > (target.accelerator.memory_bytes or 0):
            return None  # parameters and moments alone do not fit
        report = plan(experiment(size, layout, batch, target), target)
        if report.memory.fits:
            return layout, report
        print(f"# {size} on {devices}: {layout} does not fit", flush=True)
    return None


def least_bytes(size: str, devices: int) -> float:
    """Parameters, two moments and gradients in float32, split over all devices."""
    model = MODELS[size]
    attention = model["embed"] * model["head_dim"] * (2 * model["heads"] + 2 * 8)
    layer = attention + 3 * model["embed"] * model["mlp"]
    return 16.0 * (model["layers"] * layer + 2 * 128_256 * model["embed"]) / devices


def main(arguments: list[str]) -> None:
    print("| size | GPUs | layout | memory | step | tokens/s | MFU | MFU, causal half |")
    print("|---|---|---|---|---|---|---|---|")
    for size in _SIZES.value or MODELS:
        for devices in map(int, _DEVICES.value or (1, 8, 64, 256, 4_096)):
            found = best(size, devices)
            print(f"| {size} | {devices:,} | {cells(found)} |", flush=True)


def cells(found: tuple[Layout, Report] | None) -> str:
    if found is None:
        return "does not fit | | | | |"
    layout, report = found
    peak = f"{report.memory.needed / 1e9:.1f} GB"
    estimate = report.estimate
    if estimate is None:
        return f"{layout} | {peak} | | | |"
    return (
        f"{layout} | {peak} | {estimate.step_seconds:.2f} s | {estimate.tokens_per_second:,.0f} | "
        f"{estimate.mfu:.1%} | {estimate.mfu_causal:.1%}"
    )


if __name__ == "__main__":
    app.run(main)
