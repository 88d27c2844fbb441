"""How long a step's collectives take, at best, and how much of that compute does not hide.

A collective takes what the links or the network between its devices allow. Over several slices or
hosts it is hierarchical: links join the n devices of each slice or host, and between slices or
hosts each device sends 1/n of the bytes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lmlib.hardware.specifications import Accelerator
from lmlib.plan.communication.collectives import Collective, grouped
from lmlib.plan.compute_time import loop_of

# Seconds for one message from a device to the next: TPUs' over a link, GPUs' over NVLink, and
# between hosts.
LINK_LATENCY = 1e-6
NETWORK_LATENCY = 5e-6
# Bytes that long messages carry, over what the hardware's figure promises: the rest is protocol,
# and waiting for the slowest device.
LINK_EFFICIENCY = 0.8
NETWORK_EFFICIENCY = 0.8


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """Collectives of one kind, mesh axes and place, in one step.

    `seconds` is what they take; `exposed_seconds` is what no compute hides.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    where: str
    route: str
    bytes_sent: int
    seconds: float
    exposed_seconds: float


def communication_time(
    collectives: Sequence[Collective],
    compute_seconds: Mapping[str, float],
    mesh: Mesh,
    accelerator: Accelerator,
) -> tuple[CollectiveTime, ...] | None:
    """Those that overlap hide behind the compute of their own loop; `None` where `route`
    is `None`.

    Args:
      compute_seconds: of each of `lmlib.plan.compute_time.LOOPS`.
    """
    unused = dict(compute_seconds)  # compute that hides no collective yet
    found = []
    for (kind, axes, where), group in grouped(collectives):
        way = route(axes or mesh.axis_names, mesh, accelerator)
        if way is None:
            return None
        overlapping, alone = (
            math.fsum(
                way.seconds(one.bytes_sent, kind) * one.count_per_step
                for one in group
                if one.overlaps is overlaps
            )
            for overlaps in (True, False)
        )
        loop = loop_of(group[0].phase, group[0].in_layers)
        hidden = min(overlapping, unused[loop])
        unused[loop] -= hidden
        found.append(
            CollectiveTime(
                kind,
                axes,
                where,
                way.name,
                sum(one.bytes_sent_per_step for one in group),
                overlapping + alone,
                overlapping + alone - hidden,
            )
        )
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Route:
    """The network between the devices of one group.

    Args:
      inside: devices of the group that links join.
      outside: slices or hosts that the group spans.
      link_bandwidth: bytes/s that a device sends over its links to the others of its group.
      network_bandwidth: bytes/s that it sends to other slices or hosts.
      latency: seconds that a message takes to the farthest device, from hop to hop.
      mean_hops: how many links a message between two devices of a slice or host crosses.
    """

    inside: int
    outside: int
    link_bandwidth: float
    network_bandwidth: float
    latency: float
    mean_hops: float

    @property
    def name(self) -> str:
        if self.outside == 1:
            return "links"
        return "network" if self.inside == 1 else "links and network"

    def seconds(self, bytes_sent: int, kind: str) -> float:
        """For a collective over which each device of one flat ring would send `bytes_sent`.

        Links and network work at the same time on different pieces of an array, so the slower one
        decides.
        """
        n = self.inside * self.outside
        if n == 1:
            return 0.0
        whole = bytes_sent * n / (n - 1)  # all but the ring's factor (n - 1) / n
        on_links = whole * (self.inside - 1) / self.inside
        on_network = whole * (self.outside - 1) / self.outside
        if kind.endswith("all-to-all"):
            # Each device's message to each other goes all the way; nothing is shared.
            on_links *= self.mean_hops / self.outside
        else:
            on_network /= self.inside
        travelling = max(on_links / self.link_bandwidth, on_network / self.network_bandwidth)
        return travelling + (2 if kind == "all-reduce" else 1) * self.latency


def route(axes: Sequence[str], mesh: Mesh, accelerator: Accelerator) -> Route | None:
    """The route between devices that differ along `axes`; `None` where the accelerator's links, or
    its network if it is needed, are unknown."""
    group = _group(axes, mesh)
    islands: dict[int, list[jax.Device]] = {}
    for device in group:
        islands.setdefault(_island(device, accelerator), []).append(device)
    inside = max(len(island) for island in islands.values())
    links, hops, mean_hops = _links(next(iter(islands.values())), mesh.devices.flat, accelerator)
    if accelerator.link_bandwidth is None:
        return None
    if accelerator.network_bandwidth is None and len(islands) > 1:
        return None
    return Route(
        inside=inside,
        outside=len(islands),
        link_bandwidth=accelerator.link_bandwidth * links * LINK_EFFICIENCY,
        network_bandwidth=(accelerator.network_bandwidth or math.inf) * NETWORK_EFFICIENCY,
        latency=hops * LINK_LATENCY + (len(islands) - 1) * NETWORK_LATENCY,
        mean_hops=mean_hops,
    )


def dimensions_of_torus(axes: Sequence[str], mesh: Mesh) -> int:
    """Along how many dimensions of a TPU slice devices lie that differ along `axes`; 0 for others
    than TPUs."""
    group = _group(axes, mesh)
    if group[0].platform != "tpu":
        return 0
    return sum(len(set(places)) > 1 for places in zip(*(one.coords for one in group), strict=True))


def _group(axes: Sequence[str], mesh: Mesh) -> list[Any]:
    """The first of the groups of devices that differ along `axes` alone."""
    others = [index for index, name in enumerate(mesh.axis_names) if name not in axes]
    own = [mesh.axis_names.index(name) for name in axes]
    size = math.prod(mesh.shape[name] for name in axes)
    return mesh.devices.transpose(*others, *own).reshape(-1, size)[0].tolist()


def _island(device: Any, accelerator: Accelerator) -> int:
    """The slice or host whose devices are joined by links."""
    if accelerator.platform == "tpu":
        return getattr(device, "slice_index", 0)
    return device.process_index


def _links(group: Sequence[Any], everyone: Any, accelerator: Accelerator) -> tuple[int, int, float]:
    """Over how many links a device sends at once, how many it is to the farthest of `group`, and
    how many to all of them on average.

    On a torus: both ways of each dimension along which the group lies if that closes to a ring, one
    way if it doesn't. A GPU's links all lead to one switch, and a ring of GPUs is laid over it.
    """
    if accelerator.torus_dimensions == 0:
        return 1, len(group) - 1, 1.0
    coordinates = np.array([device.coords for device in group])
    every = np.array([device.coords for device in everyone])
    links = hops = 0
    mean_hops = 0.0
    for dimension in range(coordinates.shape[1]):
        size = len(set(coordinates[:, dimension].tolist()))
        full = int(every[:, dimension].max()) + 1
        is_ring = size == full and closes(full, accelerator.torus_dimensions)
        links += 0 if size == 1 else 2 if is_ring else 1
        hops += size // 2 if is_ring else size - 1
        mean_hops += size / 4 if is_ring else (size - 1 / size) / 3
    return max(links, 1), hops, max(mean_hops, 1.0)


def closes(size: int, torus_dimensions: int) -> bool:
    """Whether a dimension of a slice is a ring: of a 2D torus the whole pod's 16, of a 3D one
    multiples of 4 (jax-ml.github.io/scaling-book/tpus)."""
    return size == 16 if torus_dimensions == 2 else size % 4 == 0
