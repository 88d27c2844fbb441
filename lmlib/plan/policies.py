"""Which activations to keep: from all to none, the cheapest to compute again going first."""

import dataclasses
import functools

from lmlib.activations import saved_activations
from lmlib.experiment import Experiment
from lmlib.models.rematerialization import ACTIVATIONS
from lmlib.plan.abstract_step import abstract_step, traced
from lmlib.plan.flops import count_flops


@dataclasses.dataclass(frozen=True)
class Policy:
    """A value of `model.saved`.

    Args:
      saved: the names.
      bytes: what they take on each device, in one microbatch of the experiment.
    """

    saved: tuple[str, ...]
    bytes: int


def policies(experiment: Experiment) -> tuple[Policy, ...]:
    """Policies of falling size, each kept name less than the one before, the last one empty.

    The name that goes is the one whose bytes save the fewest FLOPs, as counted in the traced step;
    of several that save none, the largest. FLOPs that a name saves grow as others go, since more
    has to be computed again on the way to it: so old figures are bounds, and only the lowest is
    counted anew.
    """
    sizes = _sizes(experiment)
    counted = functools.cache(lambda saved: _recomputed(experiment, saved))

    def worth(name: str, saved: tuple[str, ...]) -> tuple[float, int]:
        others = tuple(other for other in saved if other != name)
        return (counted(others) - counted(saved)) / sizes[name], -sizes[name]

    saved = tuple(name for name in ACTIVATIONS if name in sizes)
    bounds = {name: worth(name, saved) for name in saved}
    found = [saved]
    while saved:
        lowest = min(bounds, key=lambda name: bounds[name])
        bounds[lowest] = worth(lowest, saved)
        if bounds[lowest] == min(bounds.values()):
            del bounds[lowest]
            saved = tuple(name for name in saved if name != lowest)
            found.append(saved)
    return tuple(Policy(saved, sum(sizes[name] for name in saved)) for saved in found)


def keeping(experiment: Experiment, saved: tuple[str, ...]) -> Experiment:
    """`experiment` with `saved` for the model's setting of that name."""
    return dataclasses.replace(experiment, model=functools.partial(experiment.model, saved=saved))


def _sizes(experiment: Experiment) -> dict[str, int]:
    """Bytes of each name on each device, of those that the model has and does not offload."""
    offloaded = experiment.abstract_model().offloaded
    names = tuple(name for name in ACTIVATIONS if name not in offloaded)
    sizes: dict[str, int] = {}
    for kept in saved_activations(keeping(experiment, names)):
        if kept.name in names:
            sizes[kept.name] = sizes.get(kept.name, 0) + kept.bytes_per_device
    return sizes


def _recomputed(experiment: Experiment, saved: tuple[str, ...]) -> float:
    """FLOPs."""
    step = abstract_step(keeping(experiment, saved))
    return count_flops(traced(step).jaxpr).of("recomputation")
