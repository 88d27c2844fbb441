"""Simulates comparisons and ladders with known truth, to check the error rates of verdicts.

    python benchmarks/verdicts.py [--comparisons=10000] [--ladders=100]

Prints how often settings without an effect are called better, which should be at most 5 %; how
often effects are found, compared with the noncentral t distribution; and how often the 90 %
intervals contain the true coefficients of a scaling law. Takes minutes.
"""

import math
import sys
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from simulated_comparisons import ERRORS, Design, differences, share

from lmlib.terminal.table import columns
from lmlib.verdicts.power_law import PowerLaw
from lmlib.verdicts.scaling_law import fit_scaling_law
from lmlib.verdicts.seeds import power

_COMPARISONS = flags.DEFINE_integer(
    "comparisons", 10_000, "Comparisons of each kind.", lower_bound=1
)
_LADDERS = flags.DEFINE_integer("ladders", 100, "Ladders of twelve runs each.", lower_bound=1)

RATE = 0.05
SEEDS = (3, 4, 5, 8)
EFFECTS = (0.5, 1.0, 2.0, 4.0)  # relative to the standard deviation of the difference between seeds
# Table A3 of Hoffmann et al. 2022, and a ladder of four sizes with three lengths.
TRUTH = PowerLaw(1.69, np.array([406.4, 410.7]), np.array([0.34, 0.28]))
LADDER = np.array([(n, n * ratio) for n in (2e7, 5e7, 1.2e8, 3e8) for ratio in (3, 12, 50)])
NOISES = (0.001, 0.004)  # standard deviation of the logarithm of a loss


def main(_: list[str]) -> None:
    count = _COMPARISONS.value
    print(f"called better of {count:,} comparisons without an effect, at most {RATE:.0%} meant\n")
    print(columns(list(_without_effect(count))))
    print("\nfound of effects (in deviations of the difference between seeds), paired\n")
    print(columns(list(_power(count))))
    print(f"\nnumbers of a law in their 90 % intervals, of {_LADDERS.value} ladders\n")
    print(columns(list(_coverage(_LADDERS.value))))


def _without_effect(count: int) -> list[list[str]]:
    kinds = {
        "paired": {},
        "other seeds": {"paired": False},
        "other seeds, beside ten": {"paired": False, "baseline_seeds": 10},
        "seeds in common, unpaired": {"paired": False, "correlation": 0.9},
    }
    rows = [["errors", "seeds", *kinds]]
    for errors in ERRORS:
        for seeds in SEEDS:
            designs = [Design(errors, seeds, **kind) for kind in kinds.values()]
            shares = [share(differences(each, count), "better") for each in designs]
            rows.append([errors, str(seeds), *(f"{each:.1%}" for each in shares)])
    return rows


def _power(count: int) -> list[list[str]]:
    rows = [["seeds", *(f"{effect:g}" for effect in EFFECTS)]]
    for seeds in SEEDS:
        cells = []
        for effect in EFFECTS:
            design = Design(seeds=seeds, effect=-effect * math.sqrt(2))
            found = share(differences(design, count), "better")
            cells.append(f"{found:.1%} ({power(effect, 1.0, seeds, RATE):.1%})")
        rows.append([str(seeds), *cells])
    return rows


def _coverage(ladders: int) -> list[list[str]]:
    rows = [["noise", "E", "A", "B", "α", "β"]]
    for noise in NOISES:
        inside = []
        for seed in range(ladders):
            errors = noise * np.random.default_rng(seed).standard_normal(len(LADDER))
            law = fit_scaling_law(*LADDER.T, TRUTH.loss(LADDER) * np.exp(errors))
            numbers = zip(law.numbers.values(), TRUTH.numbers, strict=True)
            inside.append([each.low <= value <= each.high for each, value in numbers])
        rows.append([f"{noise:.1%}", *(f"{each:.0%}" for each in np.mean(inside, axis=0))])
    return rows


if __name__ == "__main__":
    app.run(main)
