"""Metrics of an objective over validation batches, with every unit counted once."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float64, Int64

from lmlib.compute import Compute
from lmlib.data.batch import Batch, Source
from lmlib.data.prefetch import Prefetch
from lmlib.losses.next_token import NextToken
from lmlib.losses.objective import Objective, sums_of
from lmlib.models.model import Model
from lmlib.parallel.fingerprint import sums_of_bits
from lmlib.parallel.layout import sharding

NEXT_TOKEN = NextToken()


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An objective's metrics on batches of one source: sums and counts of units for each batch (N).

    `digest` is of the batches' content, in order; the same on every mesh.
    """

    sums: Mapping[str, Float64[np.ndarray, "N"]]
    counts: Int64[np.ndarray, "N"]
    digest: str
    objective: Objective

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """Returns the metrics, averaged over all units."""
        per_unit = {name: sum(each.tolist()) / self.count for name, each in self.sums.items()}
        return self.objective.means(per_unit)

    @property
    def loss(self) -> float:
        """The objective's `loss`, in its unit."""
        return self.metrics["loss"]


class Evaluator:
    """Evaluates models on the first batches of sources, which are always the same.

    At most two batches are in flight: devices never wait, and memory is bounded. More could make
    simulated devices wait for each other, since XLA's CPU client queues only 32 programs.
    """

    def __init__(self, mesh: Mesh, compute: Compute, objective: Objective = NEXT_TOKEN):
        self._mesh = mesh
        self._objective = objective
        everywhere = NamedSharding(mesh, PartitionSpec())

        def step(model: Model, reference_model: Model | None, batch: Batch) -> tuple[Any, ...]:
            """Sums of the metrics without dropout, the count of units, a digest of the batch."""
            reported = sums_of(objective, model, reference_model, batch, compute).reported
            bits = jnp.stack([sums_of_bits(field) for field in jax.tree.leaves(batch)])
            return (
                {name: reported[name] for name in objective.metrics},
                objective.count(batch),
                bits,
            )

        self._step = jax.jit(step, out_shardings=(everywhere, everywhere, everywhere))

    def __call__(
        self, model: Model, source: Source, batches: int, reference_model: Model | None = None
    ) -> Evaluation:
        """Returns the metrics of `model` over the first `batches` batches of `source`.

        Raises ValueError if the objective counts no units in these batches.
        """
        rows = sharding("batch seq", self._mesh)
        with jax.set_mesh(self._mesh), Prefetch(source, rows, 0, batches) as placed:
            found: list[tuple[dict[str, Array], Array, Array]] = []
            for _, batch in placed:
                found.append(self._step(model, reference_model, batch))
                jax.block_until_ready(found[-2:][0])
        sums, counts, bits = zip(*jax.device_get(found), strict=True)
        names = self._objective.metrics
        evaluation = Evaluation(
            {name: np.array([each[name] for each in sums], np.float64) for name in names},
            np.array(counts, np.int64),
            hashlib.sha256(np.stack(bits).astype("<u4").tobytes()).hexdigest()[:32],
            self._objective,
        )
        if evaluation.count == 0:
            raise ValueError(
                f"{type(self._objective).__name__} has no targets in {batches:,} "
                "validation batches: every position is masked"
                + (", or belongs to no pair" if self._objective.compares_pairs else "")
            )
        return evaluation


def bits_per_byte(nats_per_target: float, bytes_per_target: float) -> float:
    """Converts a cross-entropy to bits per byte of text; comparable across tokenizers."""
    return nats_per_target / math.log(2) / bytes_per_target


def validation_metrics(
    objective: Objective, sets: Mapping[str, Source], named: bool, begin: str
) -> dict[str, str]:
    """Returns the names and units of the metrics on validation `sets`.

    `begin` is "validation" for the whole sets, "evaluation" for the part evaluated during training.
    Each metric has a total, `validation_loss`, and `validation_loss/NAME` if sets are `named`.
    Text has bits per byte too.
    """
    names = tuple(sets) if named else ()
    found: dict[str, str] = {}
    if not sets:
        return found
    places = ("", *(f"/{each}" for each in names))
    for metric, known in objective.metrics.items():
        found |= {f"{begin}_{metric}{at}": known.unit for at in places}
    if objective.cross_entropy is not None:
        are_text = [name for name, each in sets.items() if each.bytes_per_target is not None]
        total = ("",) if len(are_text) == len(sets) else ()
        parts = (f"/{name}" for name in names if name in are_text)
        found |= {f"{begin}_bits_per_byte{at}": "bits per byte" for at in (*total, *parts)}
    return found
