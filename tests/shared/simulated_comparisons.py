"""Simulated comparisons with known truth."""

import dataclasses
from collections.abc import Callable

import numpy as np

from lmlib.verdicts.seeds import Difference, paired_difference, unpaired_difference

# Errors of a run, with a mean of 0 and a spread of about 1.
ERRORS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "heavy tails": lambda generator, shape: generator.standard_t(2, shape),
    "skewed": lambda generator, shape: np.exp(generator.standard_normal(shape)) - np.exp(0.5),
}


@dataclasses.dataclass(frozen=True)
class Design:
    """Seeds of both settings, pairing, correlation of losses at one seed, deviations and effect."""

    errors: str = "normal"
    seeds: int = 3
    baseline_seeds: int | None = None
    paired: bool = True
    correlation: float = 0.0
    deviations: tuple[float, float] = (1.0, 1.0)
    effect: float = 0.0


def differences(design: Design, count: int, seed: int = 0) -> list[Difference]:
    """Returns `count` independent comparisons; the setting's loss is higher by the effect."""
    generator, draw = np.random.default_rng(seed), ERRORS[design.errors]
    common = np.sqrt(design.correlation) * draw(generator, (count, design.seeds))
    apart = np.sqrt(1 - design.correlation)
    ours_CS = common + apart * draw(generator, (count, design.seeds))
    ours_CS = design.effect + design.deviations[0] * ours_CS
    theirs_CT = apart * draw(generator, (count, design.baseline_seeds or design.seeds))
    if design.paired:
        return [paired_difference(each) for each in ours_CS - (common + theirs_CT)]
    both = min(common.shape[1], theirs_CT.shape[1])
    theirs_CT[:, :both] += common[:, :both]
    theirs_CT = design.deviations[1] * theirs_CT
    return [unpaired_difference(*each) for each in zip(ours_CS, theirs_CT, strict=True)]


def share(found: list[Difference], verdict: str, margin: float = 0.0, rate: float = 0.05) -> float:
    """Returns the fraction of comparisons with this verdict."""
    return sum(each.verdict(margin, rate) == verdict for each in found) / len(found)
