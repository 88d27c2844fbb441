"""Faults of the runner and the experiments."""

from faults_of_code.mutation import Mutation

MUTATIONS = (
    Mutation(
        "a run goes on with the weights of another model",
        "runner/training/beginning.py",
        'if of_the_model and "model" not in allowed_changes:',
        'if of_the_model and "model" in allowed_changes:',
        "tests/runner/test_beginning.py tests/runner/test_starts.py",
    ),
    Mutation(
        "changed data is not noticed if it begins alike",
        "runner/training/data_probe.py",
        'found["last"] = _digest(source, steps_made - 1)',
        'found["last"] = _digest(source, 0)',
        "tests/runner/test_data_probe.py",
    ),
    Mutation(
        "the rows that another batch size repeats are counted by its own size",
        "runner/training/data_probe.py",
        "due = steps * size",
        "due = steps * other",
        "tests/runner/test_data_probe.py",
    ),
    Mutation(
        "processes compare the first rows of data and not what lies behind them",
        "runner/training/data_probe.py",
        "Read([*stored.values(), *rows]",
        "Read([*rows]",
        "tests/runner/test_data_probe.py",
    ),
    Mutation(
        "a run goes on with other settings of JAX",
        "runner/training/starts.py",
        'if is_kept or "jax" not in allowed_changes:',
        "if is_kept:",
        "tests/runner/test_beginning.py",
    ),
    Mutation(
        "successive halving keeps the worse half",
        "runner/sweep/halving.py",
        "left = compared[:kept]",
        "left = compared[-kept:]",
        "tests/runner/sweep/test_halving.py",
    ),
    Mutation(
        "tokens are those of a step, not of the run",
        "runner/training/recorder.py",
        "self.tokens += valid",
        "self.tokens = valid",
        "tests/runner/test_fit.py",
    ),
    Mutation(
        "the checkpoint from before skipped updates is not held",
        "runner/training/saving.py",
        "hold = self.before_skipped if skipping else None",
        "hold = None",
        "tests/runner/test_saving.py",
    ),
    Mutation(
        "a step is evaluated before it is saved",
        "runner/training/loop.py",
        "                if saves:\n"
        "                    self.saving.action(self._moment(step, state, line))\n"
        "                for action in due:\n"
        "                    self._act(action, step, state, line)\n",
        "                for action in due:\n"
        "                    self._act(action, step, state, line)\n"
        "                if saves:\n"
        "                    self.saving.action(self._moment(step, state, line))\n",
        "tests/runner/test_validation.py tests/runner/test_saving.py",
    ),
    Mutation(
        "a resumed run gives a sink the step of its checkpoint no more",
        "lmlib/metrics/log.py",
        "Sinks(sinks, folder, last + 1, tell)",
        "Sinks(sinks, folder, last, tell)",
        "tests/outsiders/test_sink_of_metrics.py tests/test_metrics.py",
    ),
    Mutation(
        "a sink that fails ends the run",
        "lmlib/metrics/sinks.py",
        "except Exception as error:",
        "except OSError as error:",
        "tests/outsiders/test_sink_of_metrics.py tests/test_metrics.py",
    ),
    Mutation(
        "an action that is due at the end is left out",
        "lmlib/experiment/actions.py",
        "return step % self.steps == 0 or (self.at_end and last)",
        "return step % self.steps == 0",
        "tests/outsiders/test_periodic_action.py",
    ),
    Mutation(
        "an override of 1.5 for a whole number is cut to 1",
        "runner/config/overrides.py",
        "if kind is float and int in accepted and value.is_integer():",
        "if kind is float and int in accepted:",
        "tests/runner/test_configs.py",
    ),
    Mutation(
        "a stranger's config may name anything",
        "runner/config/saved_config.py",
        "        named_value(module, symbol, self._trusted)\n        return True",
        "        return True",
        "tests/strangers/test_configs.py tests/runner/test_saved_configs.py",
    ),
    Mutation(
        "a stopped run says that it finished",
        "runner/command_line/exit_status.py",
        "STOPPED = 75",
        "STOPPED = 0",
        "tests/runner/test_stopping.py",
    ),
    Mutation(
        "an experiment's default changes unseen",
        "experiments/llama_1b.py",
        "cfg.optimizer.peak_lr = 3e-4",
        "cfg.optimizer.peak_lr = 3e-3",
        "tests/experiments/test_experiments.py",
    ),
)
