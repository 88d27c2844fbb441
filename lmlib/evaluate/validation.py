"""The metrics of an objective over validation batches, every unit counted once."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from lmlib.compute import Compute
from lmlib.data.batch import Batch, Source
from lmlib.data.prefetch import Prefetch
from lmlib.losses import NextToken, Objective
from lmlib.models.protocol import Model
from lmlib.parallel.layout import partition

NEXT_TOKEN = NextToken()


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics of an objective, on average over `count` of its units: tokens or pairs."""

    metrics: Mapping[str, float]
    count: int

    @property
    def loss(self) -> float:
        """In the unit that the objective gives its `loss`."""
        return self.metrics["loss"]


def evaluation_step(
    model: Model,
    reference_model: Model | None,
    batch: Batch,
    compute: Compute,
    objective: Objective,
) -> tuple[dict[str, Array], Int32[Array, ""]]:
    """The sums of the objective's metrics over a batch, nothing dropped at random, and the count of
    its units."""
    reported = objective.sums(model, reference_model, batch, compute).reported
    return {name: reported[name] for name in objective.metrics}, objective.count(batch)


class Evaluator:
    """Evaluates models on the first batches of sources, always the same ones.

    At most two batches are under way: the devices never wait, and hold no more than that. XLA's CPU
    client lets 32 programs wait; one more blocks the thread that starts it, which may be the thread
    that another device needs, and simulated devices then wait for each other until XLA aborts.
    """

    def __init__(self, mesh: Mesh, compute: Compute, objective: Objective = NEXT_TOKEN):
        self._mesh = mesh
        self._objective = objective
        everywhere = NamedSharding(mesh, PartitionSpec())
        step = functools.partial(evaluation_step, compute=compute, objective=objective)
        self._step = jax.jit(step, out_shardings=(everywhere, everywhere))

    def __call__(
        self, model: Model, source: Source, batches: int, reference_model: Model | None = None
    ) -> Evaluation:
        """The metrics of `model` over the first `batches` batches of `source`.

        Args:
          reference_model: the one that the objective needs.

        Raises:
          ValueError: if the objective counts nothing in them.
        """
        rows = NamedSharding(self._mesh, partition("batch seq"))
        with jax.set_mesh(self._mesh), Prefetch(source, rows, 0, batches) as placed:
            found: list[tuple[dict[str, Array], Array]] = []
            for _, batch in placed:
                found.append(self._step(model, reference_model, batch))
                jax.block_until_ready(found[-2:][0])
        sums, counts = zip(*jax.device_get(found), strict=True)
        count = sum(int(each) for each in counts)
        if count == 0:
            raise ValueError(
                f"{type(self._objective).__name__} has nothing to measure in {batches:,} "
                "validation batches: every position is masked"
                + (", or belongs to no pair" if self._objective.compares_pairs else "")
            )
        # Summed in float64.
        totals = {name: sum(float(each[name]) for each in sums) for name in self._objective.metrics}
        return Evaluation({name: total / count for name, total in totals.items()}, count)


def bits_per_byte(nats_per_target: float, bytes_per_target: float) -> float:
    """A cross-entropy as bits for each byte of text; comparable across tokenizers."""
    return nats_per_target / math.log(2) / bytes_per_target


def validation_metrics(
    objective: Objective, sets: Mapping[str, Source], named: bool
) -> dict[str, str]:
    """The names of what validation on `sets` measures, each with its unit.

    They are `validation_loss` and so on, the total over all sets, and if sets are `named`
    `validation_loss/NAME` of each. Sets of text have bits per byte too, and so has their total if
    all sets are text.
    """
    names = tuple(sets) if named else ()
    found: dict[str, str] = {}
    if not sets:
        return found
    for metric, (unit, _) in objective.metrics.items():
        found |= {f"validation_{metric}{at}": unit for at in ("", *(f"/{each}" for each in names))}
    if objective.cross_entropy is not None:
        are_text = [name for name, each in sets.items() if each.bytes_per_target is not None]
        total = ("",) if len(are_text) == len(sets) else ()
        each = (f"/{name}" for name in names if name in are_text)
        found |= {f"validation_bits_per_byte{at}": "bits per byte" for at in (*total, *each)}
    return found
