"""Faults of what is said of finished runs."""

from faults_of_code.mutation import Mutation

SIMULATIONS = "tests/verdicts/test_verdicts.py"

MUTATIONS = (
    Mutation(
        "a higher loss is better",
        "lmlib/verdicts/seeds.py",
        'return "better" if self.mean < 0 else "worse"',
        'return "better" if self.mean > 0 else "worse"',
        SIMULATIONS,
    ),
    Mutation(
        "a difference within the margin is better",
        "lmlib/verdicts/seeds.py",
        "t = (abs(self.mean) - margin) / self.standard_error",
        "t = (abs(self.mean) + margin) / self.standard_error",
        SIMULATIONS,
    ),
    Mutation(
        "seeds do not narrow a difference",
        "lmlib/verdicts/seeds.py",
        "True, deviation, deviation / math.sqrt(seeds), float(seeds - 1))",
        "True, deviation, deviation, float(seeds - 1))",
        SIMULATIONS,
    ),
    Mutation(
        "three seeds have the certainty of many",
        "lmlib/verdicts/seeds.py",
        "math.sqrt(one + other), error, float(seeds - 1))",
        "math.sqrt(one + other), error, 1e6)",
        SIMULATIONS,
    ),
    Mutation(
        "losses of other text are compared",
        "lmlib/verdicts/finished.py",
        "if first.digest == second.digest:",
        "if first.digest != second.digest:",
        "tests/verdicts/test_comparison.py",
    ),
    Mutation(
        "a continued run counts as finished",
        "lmlib/verdicts/finished.py",
        "if steps not in (None, str(found.steps)):",
        "if steps is None:",
        "tests/verdicts/test_comparison.py",
    ),
    Mutation(
        "batches are not paired",
        "lmlib/verdicts/paired_batches.py",
        "sums(one, each) - sums(other, each)",
        "sums(one, each)",
        "tests/verdicts/test_comparison.py",
    ),
    Mutation(
        "the speedup is upside down",
        "lmlib/verdicts/speedup.py",
        "-math.log(goal)",
        "math.log(goal)",
        "tests/verdicts/test_speedup.py",
    ),
    Mutation(
        "a budget goes to parameters and tokens the wrong way round",
        "lmlib/verdicts/scaling_law.py",
        "math.log(alpha / beta) + a - b",
        "math.log(beta / alpha) + b - a",
        "tests/verdicts/test_scaling_law.py",
    ),
    Mutation(
        "intervals of a law forget the numbers that were fitted",
        "lmlib/verdicts/power_law.py",
        "freedom = len(self.losses_R) - len(self._low)",
        "freedom = 100 * len(self.losses_R)",
        "tests/verdicts/test_scaling_law.py",
    ),
)
