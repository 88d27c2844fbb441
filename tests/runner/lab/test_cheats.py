"""Cheats of a candidate's module: each is refused, or leaves the verdict as it is.

A module that only changes its own process exports the same programs as the honest one, bit for bit.
The library then trains and evaluates them, with code and data that the module never reached.
"""

import json
import sys

import numpy as np
import pytest

from runner.config import configs
from runner.errors import ConfigError
from runner.lab.comparison import Comparison, Task
from runner.lab.verdict import checks, read_verdict, signed
from runner.training.fit import fit
from runner.training.options import Options

TASK = """
from experiments import quickstart

def config():
    cfg = quickstart.config()
    quickstart.tiny(cfg)
    cfg.model.layers = cfg.compute.unroll = 1
    cfg.model.embed, cfg.model.heads, cfg.model.mlp = 32, 2, 64
    cfg.data.path.max_bytes, cfg.data.path.cache = 200_000, {cache!r}
    cfg.steps, cfg.samples.prompts = 6, ()
    return cfg
"""
HONEST = """
from lmlib.optim.adamw import adamw

def optimizer(steps, scaled=None):
    return adamw(steps, peak_lr=1e-2)
"""


class Lab:
    """A task in its own folder, with the programs of the baseline and of an honest candidate."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0
        self.task = folder / "lab_task.py"
        self.task.write_text(TASK.format(cache=str(folder / "cache")))
        self.comparison = Comparison(Task(str(self.task)), folder / "unused")
        self.baseline = self.comparison.baseline(folder / "baseline")
        self.honest = self.candidate(HONEST)

    def candidate(self, text, comparison=None):
        self.count += 1
        place = self.folder / f"candidate_{self.count}"
        place.mkdir()
        file = place / "my_candidate.py"
        file.write_text(text)
        made = comparison or self.comparison
        return made.candidate(self.baseline, file, self.baseline.steps, place / "programs")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


def digests(arm):
    return {name: program.digest for name, program in arm.programs.items()}


IN_ITS_OWN_PROCESS = {
    "the evaluation": """
import lmlib.evaluate.validation as validation
validation.Evaluator.__call__ = lambda *arguments: None
""",
    "the lab's evaluation": """
import runner.lab.trial as trial
trial.evaluate = lambda *arguments: 0.0
trial.summed_loss = lambda *arguments: 0.0
""",
    "the data reader": """
from lmlib.data.flat_tokens import FlatTokens
old = FlatTokens.__init__
FlatTokens.__init__ = lambda self, path, split, *a, **k: old(self, path, "validation", *a, **k)
""",
    "the number of steps": """
import runner.lab.trial as trial
old = trial.train
def train(arm, *rest):
    for _ in range(10):
        found = old(arm, *rest)
    return found
trial.train = train
""",
    "the statistics": """
from lmlib.verdicts.seeds import Difference
Difference.verdict = lambda *arguments: "better"
""",
    "the seeds": """
import runner.lab.verdict as verdict
verdict.seeds_of = lambda content, count: [7] * count
""",
    "time": """
import time
time.process_time = time.perf_counter = lambda: 0.0
""",
    "random numbers": """
import numpy
numpy.random.default_rng = lambda *arguments: None
numpy.random.permutation = lambda x: x
""",
    "environment variables": """
import os
os.environ.update(XLA_FLAGS="--xla_cpu_enable_fast_math=true", JAX_ENABLE_X64="1", LAB_STEPS="99")
""",
    "hooks": """
import sys
sys.setprofile(lambda *arguments: None)
sys.settrace(lambda *arguments: None)
sys.addaudithook(lambda *arguments: None)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", IN_ITS_OWN_PROCESS)
def test_what_a_module_changes_in_its_process_stays_there(lab, cheat):
    assert digests(lab.candidate(IN_ITS_OWN_PROCESS[cheat] + HONEST)) == digests(lab.honest)


OF_THE_CONFIG = {
    "cfg.steps *= 2": "changes steps",
    "cfg.data.batch_size *= 2": "changes data.batch_size",
    "cfg.microbatches = 2": "changes microbatches",
    "cfg.seed = 7": "changes seed",
    "cfg.validation.batch_size = 1": "changes validation.batch_size",
    "cfg.model.mlp = 128": "weights, and the baseline's",
}
REFUSED = {
    "validation text in constants": (
        """
import numpy as np
import optax
from lmlib.optim.from_optax import from_optax
stolen = np.random.default_rng(0).normal(size=50_000).astype("float32")

def stealing(learning_rate):
    inner = optax.sgd(learning_rate)
    def update(updates, state, params=None):
        import jax
        more = jax.numpy.asarray(stolen).sum()
        updates = jax.tree.map(lambda x: x * more, updates)
        return inner.update(updates, state, params)
    return optax.GradientTransformation(inner.init, update)

def optimizer(steps):
    return from_optax(steps, 1e-2, stealing)
""",
        "constants of",
    ),
    "a callback that reads a file": (
        """
import jax
import numpy as np
import optax
from lmlib.optim.from_optax import from_optax

def peeking(learning_rate):
    inner = optax.sgd(learning_rate)
    def update(updates, state, params=None):
        def peek(x):
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(lambda y: np.asarray(y), like, x)
        return inner.update(jax.tree.map(peek, updates), state, params)
    return optax.GradientTransformation(inner.init, update)

def optimizer(steps):
    return from_optax(steps, 1e-2, peeking)
""",
        "callback",
    ),
    "logits that see the next token": (
        """
import jax.numpy as jnp
from lmlib.models.decoder import Decoder
old = Decoder.features
Decoder.features = lambda self, x, context: jnp.roll(old(self, x, context), -1, axis=1)

def candidate(cfg):
    cfg.model.rope_theta = 5_000.0
""",
        "depend on later tokens",
    ),
    "an early end": ("import os\nos._exit(0)\n", "ended the process"),
    "a helper file": ("import my_helper\n", "my_helper"),
    "nothing": ("x = 1\n", "needs a function"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", OF_THE_CONFIG)
def test_a_config_outside_the_budget_is_refused(lab, change):
    with pytest.raises(ConfigError, match=OF_THE_CONFIG[change]):
        lab.candidate(f"def candidate(cfg):\n    {change}\n")


@pytest.mark.slow
@pytest.mark.parametrize("cheat", REFUSED)
def test_a_program_that_could_know_more_is_refused(lab, cheat):
    text, message = REFUSED[cheat]
    with pytest.raises(ConfigError, match=message):
        lab.candidate(text)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the data", "the code"])
def test_a_file_that_the_module_changes_is_noticed(lab, what):
    if what == "the data":
        (file,) = (lab.folder / "cache").glob("*/validation/*.json")
    else:
        file = lab.task
    before = file.read_bytes()
    command = [sys.executable, "-c", f"open({str(file)!r}, 'a').write('  ')"]
    comparison = Comparison(Task(str(lab.task)), lab.folder / "unused")
    try:
        with pytest.raises(ConfigError, match=f"{what} changed during the comparison"):
            lab.candidate(f"import subprocess\nsubprocess.run({command!r})\n{HONEST}", comparison)
    finally:
        file.write_bytes(before)


@pytest.mark.slow
def test_a_longer_horizon_and_another_loss_buy_no_steps_and_no_evaluation(lab):
    text = HONEST.replace("adamw(steps,", "adamw(100 * steps,") + """
from lmlib.losses.next_token import NextToken
old = NextToken.sums
def sums(self, *arguments, **more):
    found = old(self, *arguments, **more)
    return found._replace(loss_sum=0.0 * found.loss_sum)
NextToken.sums = sums
"""  # fmt: skip
    arm = lab.candidate(text)
    assert arm.programs["step"].digest != lab.honest.programs["step"].digest
    for name in ("fresh", "logits"):
        assert arm.programs[name] is lab.baseline.programs[name]
    assert arm.steps == lab.baseline.steps


@pytest.mark.slow
def test_the_baseline_is_the_run_of_the_same_seed(lab, tmp_path):
    """Training and evaluation from programs give what `fit` gives."""
    trial = lab.comparison.train(lab.baseline, seed=3)
    cfg = configs.load(str(lab.task), (), ["seed=3", "data.seed=3"])
    cfg.mesh.fsdp = 1
    summary = fit(cfg, tmp_path / "run", Options(reports=False)).summary
    np.testing.assert_allclose(trial.loss, summary.validation_loss, rtol=2e-6)
    assert trial.tokens == summary.tokens


@pytest.mark.slow
def test_a_replaced_result_that_is_signed_again_fails_when_it_is_run_again(lab, tmp_path):
    module = tmp_path / "honest.py"
    module.write_text(HONEST)
    workdir = tmp_path / "lab"
    comparison = Comparison(Task(str(lab.task)), workdir)
    settings = {"equal": "tokens", "steps_to": None, "margin": 0.0, "salt": "", "key": None}
    comparison.judge(module, seeds=2, **settings)
    content = read_verdict(workdir / "verdict.json")
    found = [*checks(content, None), *comparison.checks(content), *comparison.rerun(content)]
    assert all(each.holds for each in found), found

    forged = json.loads(json.dumps(content))
    forged["runs"]["candidate"][0]["weights"] = "00" * 32  # of another checkpoint
    forged = signed(forged, None)
    assert all(each.holds for each in checks(forged, None))
    failed = [each.statement for each in comparison.rerun(forged) if not each.holds]
    assert failed == ["the first seed of the candidate gives the same bits"]

    for name in ("programs/step.program", "baseline/step.program"):
        (workdir / name).write_bytes((workdir / "programs" / "step.program").read_bytes())
    (workdir / "candidate" / "honest.py").write_text(HONEST + "# better\n")
    failed = [each.statement for each in comparison.checks(content) if not each.holds]
    assert len(failed) == 2, failed
