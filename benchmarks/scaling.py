"""Plans for 1B to 405B parameters on 1 to 4,096 GPUs: the table of docs/scaling.md.

    pip install -e '.[plan-gpu]' && python benchmarks/scaling.py [--sizes=8B] [--devices=64,256]
    python benchmarks/scaling.py --networks=50,12.5,3.125   # compares pipeline stages as well

Every step is compiled for the absent GPUs, in one to a few minutes each, layout by layout until one
fits; nothing is measured. A step has 4.2 M tokens, or 16.8 M on 4,096 GPUs.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from absl import app, flags
from jax.sharding import Mesh

from lmlib.experiment import Experiment
from lmlib.models.pipeline.schedule import Schedule
from lmlib.plan import targets
from lmlib.plan.planner import Report, plan
from lmlib.plan.step_time import with_communication
from runner.aot.abstract_inputs import built, without_data
from runner.config import configs
from runner.jax_settings.xla_flags import set_gpu_flags

_SIZES = flags.DEFINE_list("sizes", None, "Sizes: 1B, 8B, 70B, 405B; all by default.")
_DEVICES = flags.DEFINE_list(
    "devices", None, "Numbers of GPUs; 1, 8, 64, 256 and 4,096 by default."
)
_NETWORKS = flags.DEFINE_list(
    "networks", [], "GB/s of each GPU to other hosts: step times with and without stages."
)
_GPU = flags.DEFINE_string("gpu", "h100", "Kind of GPU.")

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
# Maximum bytes on a GPU of parameters, moments and gradients, and of these plus layer inputs.
ROOM_FOR_WEIGHTS, ROOM_FOR_ALL = 30e9, 55e9
SMALL_BUBBLE, LARGEST_BUBBLE = 0.1, 1 / 3
# of a size, a number of GPUs and a number of sequences
Candidates = Callable[[str, int, int], Iterator["Layout"]]


class Layout(NamedTuple):
    """Mesh sizes, sequences per device in a microbatch, saved activations, pipeline rounds."""

    data: int
    fsdp: int
    tensor: int
    sequences: int
    saved: tuple[str, ...] = NOTHING_SAVED
    stage: int = 1
    rounds: int = 1

    @property
    def whole_rows(self) -> int:
        """The number of sequences if each device, or each tensor-parallel group, has one."""
        return self.data * self.stage * self.fsdp

    @property
    def bubble(self) -> float:
        return Schedule(self.stage, self.sequences, self.rounds).bubble

    def __str__(self) -> str:
        names = "data", "stage", "fsdp", "tensor"
        used = [f"{name} {size}" for name in names if (size := getattr(self, name)) > 1]
        around = f", {self.rounds} rounds" if self.rounds > 1 else ""
        rows = f", {self.sequences} rows" if self.sequences > 1 else ""
        kept = "" if self.saved else ", all computed again"
        return f"{' × '.join(used or ['one device'])}{around}{rows}{kept}"


ROWS_AND_SAVED = ((2, KERNELS_SAVED), (1, KERNELS_SAVED), (1, NOTHING_SAVED))


def layouts(size: str, devices: int, batch: int) -> Iterator[Layout]:
    """Yields the candidates, fastest first: only FSDP, then tensor parallelism within hosts.

    FSDP communicates least for its computation as long as every device has full sequences.
    """
    for tensor, (sequences, saved) in itertools.product((1, 2, 4, 8), ROWS_AND_SAVED):
        shards = devices // tensor
        # Beyond 512 shards, the pieces of a gather are too small for good bandwidth.
        fsdp = min(shards, 512)
        if devices % tensor == 0 and batch % (shards * sequences) == 0:
            yield Layout(shards // fsdp, fsdp, tensor, sequences, saved)


def with_copies(size: str, devices: int, batch: int) -> Iterator[Layout]:
    """Yields HSDP layouts: FSDP over the fewest hosts that hold the weights, and copies.

    Only gradients are sent between copies.
    """
    for hosts, tensor, (sequences, saved) in itertools.product(
        (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), ROWS_AND_SAVED
    ):
        fsdp = hosts * GPUS_OF_A_HOST // tensor
        data = devices // (fsdp * tensor)
        holds = least_bytes(size, fsdp * tensor) < ROOM_FOR_WEIGHTS
        if data >= 2 and holds and batch % (data * fsdp * sequences) == 0:
            yield Layout(data, fsdp, tensor, sequences, saved)


def in_stages(size: str, devices: int, batch: int) -> Iterator[Layout]:
    """Yields pipelines with the fewest rounds that make the bubble small."""
    return _staged(size, devices, batch, range(1, MODELS[size]["layers"] + 1), SMALL_BUBBLE)


def in_stages_once(size: str, devices: int, batch: int) -> Iterator[Layout]:
    """Yields pipelines of one round, which communicate least, with a bubble of up to a third."""
    return _staged(size, devices, batch, range(1, 2), LARGEST_BUBBLE)


def _staged(
    size: str, devices: int, batch: int, rounds: Iterable[int], bubble: float
) -> Iterator[Layout]:
    """Yields pipelines: few stages first, then large microbatches, whose bubble is small.

    A stage is the GPUs of a host, or of several hosts with copies of the same layers.
    """
    model = MODELS[size]
    for stage, tensor in itertools.product((8, 16, 32), (1, 2, 4, 8)):
        fsdp = GPUS_OF_A_HOST // tensor
        data = devices // (stage * fsdp * tensor)
        if data < 1 or batch % (data * stage * fsdp):
            continue
        each = -(-model["layers"] // stage)
        sequences = batch // (data * stage * fsdp)
        while sequences >= 1:
            inputs = 2.0 * sequences * SEQUENCE * model["embed"] * model["layers"] / tensor
            held = least_bytes(size, stage * fsdp * tensor) + inputs
            counts = [count for count in rounds if each % count == 0]
            found = (Layout(data, fsdp, tensor, sequences, (), stage, count) for count in counts)
            small = next((layout for layout in found if layout.bubble < bubble), None)
            if held < ROOM_FOR_ALL and small is not None:
                yield small
            sequences //= 2


def experiment(size: str, layout: Layout, batch: int, target: targets.Target) -> Experiment:
    cfg = configs.load("experiments/llama_8b")
    for name, value in MODELS[size].items():
        setattr(cfg.model, name, value)
    cfg.compute.saved = layout.saved
    cfg.compute.sequence_parallel = layout.tensor > 1
    cfg.compute.pipeline_rounds = layout.rounds
    for name in ("data", "stage", "fsdp", "tensor"):
        setattr(cfg.mesh, name, getattr(layout, name))
    cfg.data.batch_size = batch
    cfg.microbatches = batch // (layout.whole_rows * layout.sequences)
    return built(without_data(cfg), target.devices())


class Found(NamedTuple):
    """A layout that fits, with its plan and mesh."""

    layout: Layout
    report: Report
    mesh: Mesh


def best(size: str, devices: int, candidates: Candidates) -> Found | None:
    """Returns the first layout that fits."""
    target, batch = target_of(devices), 2_048 if devices > 1_024 else 512
    targets.prepare(target)
    set_gpu_flags()
    for layout in candidates(size, devices, batch):
        if least_bytes(size, devices) > (target.accelerator.memory_bytes or 0):
            return None  # parameters and moments do not fit
        made = experiment(size, layout, batch, target)
        report = plan(made, target)
        if report.memory.fits:
            return Found(layout, report, made.mesh)
        print(f"# {size} on {devices}: {layout} does not fit", flush=True)
    return None


def target_of(devices: int) -> targets.Target:
    hosts = max(1, devices // GPUS_OF_A_HOST)
    return targets.parse(f"{_GPU.value}:{hosts}x{devices // hosts}")


def least_bytes(size: str, devices: int) -> float:
    """Returns the bytes per device of parameters, two moments and gradients in float32."""
    model = MODELS[size]
    attention = model["embed"] * model["head_dim"] * (2 * model["heads"] + 2 * 8)
    layer = attention + 3 * model["embed"] * model["mlp"]
    return 16.0 * (model["layers"] * layer + 2 * 128_256 * model["embed"]) / devices


def main(arguments: list[str]) -> None:
    sizes = _SIZES.value or MODELS
    if _NETWORKS.value:
        counts = [int(devices) for devices in _DEVICES.value or (64, 256, 4_096)]
        speeds = [float(speed) for speed in _NETWORKS.value]
        return print_networks(sizes, counts, speeds)
    print("| size | GPUs | layout | memory | step | MFU | MFU, causal half |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        for devices in map(int, _DEVICES.value or (1, 8, 64, 256, 4_096)):
            found = best(size, devices, layouts)
            print(f"| {size} | {devices:,} | {cells(found)} |", flush=True)


def print_networks(sizes: Iterable[str], counts: Sequence[int], speeds: Sequence[float]) -> None:
    """Prints the step times for each network speed, in GB/s per GPU to other hosts."""
    heads = " | ".join(f"step at {speed:g} GB/s" for speed in speeds)
    print(f"| size | GPUs | layout | memory | bubble | {heads} |")
    print("|---|---|---|---|---|" + "---|" * len(speeds))
    for size, devices, candidates in itertools.product(
        sizes, counts, (layouts, with_copies, in_stages, in_stages_once)
    ):
        found = best(size, devices, candidates)
        if found is None:
            print(f"# {size} on {devices}: no layout of {candidates.__name__} fits", flush=True)
            continue
        peak = f"{found.report.memory.needed / 1e9:.1f} GB"
        bubble = f"{found.layout.bubble:.1%}" if found.layout.stage > 1 else ""
        steps = " | ".join(f"{seconds_at(found, speed * 1e9, devices):.2f} s" for speed in speeds)
        print(
            f"| {size} | {devices:,} | {found.layout} | {peak} | {bubble} | {steps} |", flush=True
        )


def seconds_at(found: Found, bandwidth: float, devices: int) -> float:
    """Returns the step time of the same compiled program on a network of `bandwidth` bytes/s."""
    report, accelerator = found.report, target_of(devices).on_network(bandwidth).accelerator
    assert report.estimate is not None and report.collectives is not None
    expected = with_communication(
        report.estimate.scopes, report.flops, report.collectives, accelerator, found.mesh
    )
    assert expected is not None
    return expected.step_seconds


def cells(found: Found | None) -> str:
    if found is None:
        return "does not fit | | | |"
    peak, estimate = f"{found.report.memory.needed / 1e9:.1f} GB", found.report.estimate
    if estimate is None:
        return f"{found.layout} | {peak} | | |"
    shares = f"{estimate.mfu:.1%} | {estimate.mfu_causal:.1%}"
    return f"{found.layout} | {peak} | {estimate.step_seconds:.2f} s | {shares}"


if __name__ == "__main__":
    app.run(main)
