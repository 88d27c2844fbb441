"""Plans a run on absent hardware: memory, communication, time.

    python -m runner.plan --fdl_config=experiments/llama_8b --topology=v5e:16x16
    python -m runner.plan --fdl_config=experiments/llama_8b --topology=h100:8x8 --search
    python -m runner.plan --fdl_config=experiments/llama_8b

--fdl_config, --fiddler, --fdl.x.y=…   as for `python -m runner`; the data may be missing
--topology   v5e:16x16, v4:4x4x4, 2xv5e:16x16 (two slices), h100:8x8 (hosts x GPUs of each), cpu:256
             without it, shows only the tokens and FLOPs of the full run
--network    GB/s from each device to other hosts or slices, instead of the vendor's number
--search     finds the fastest microbatches and saved activations that fit
--search_mesh=expert,tensor   tries every division of the devices among fsdp and these axes
--expert_imbalance=1.3   rows of the busiest device along `expert`, relative to even routing
--advise     always tries changes that save memory; default: only if the step does not fit
--json=FILE  also writes the report as JSON; "-": to stdout, instead of the text
--no_cache   ignores cached reports
Compiles the run's own train step on a CPU, with the target's compiler; reports are cached in the
user's cache folder. A run of several stages gets a report for each, and a table of the full run.
TPUs: pip install 'lmlib[plan-tpu]'; NVIDIA GPUs: 'lmlib[plan-gpu]'.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from fiddle import absl_flags as absl_flags  # defines --fdl_config and its like

from runner.command_line.command import first_lines, listed, run, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.flags import check_chosen, chosen_config, fiddlers_listed
from runner.config import configs
from runner.errors import ConfigError, user_errors

_TOPOLOGY = flags.DEFINE_string("topology", None, "Hardware to plan for: v5e:16x16, h100:8x8.")
_NETWORK = flags.DEFINE_float("network", None, "GB/s from each device to other hosts or slices.")
_SEARCH = flags.DEFINE_bool("search", False, "Search for the fastest settings that fit.")
_SEARCH_MESH = flags.DEFINE_list("search_mesh", [], "Try all sizes of these mesh axes.")
_ADVISE = flags.DEFINE_bool("advise", False, "Try changes that save memory.")
_IMBALANCE = flags.DEFINE_float(
    "expert_imbalance", 1.0, "Rows of the busiest experts' device, over even ones.", lower_bound=1.0
)
_JSON = flags.DEFINE_string("json", None, "JSON file for the report; -: stdout, without text.")
_NO_CACHE = flags.DEFINE_bool("no_cache", False, "Ignore cached reports.")

if __name__ == "__main__":
    # absl shows the module's docstring as --help.
    __doc__ += listed("experiments", first_lines(configs.experiments()))
    take_flags(fiddlers_listed)  # the imports below take seconds

import fiddle as fdl
import jax

from lmlib.experiment import Experiment
from lmlib.hardware.specifications import ACCELERATORS
from lmlib.parallel.other_meshes import check_axes
from lmlib.plan import targets
from lmlib.plan.planner import Report, WholeRun, check, plan, section, stderr_kept, versions
from lmlib.plan.search import advise, search, search_meshes
from lmlib.plan.targets import Target
from runner.aot import plan_cache as kept_plans
from runner.aot.abstract_inputs import built, without_data
from runner.aot.cost import cost_of
from runner.jax_settings.devices import check_one_cuda_plugin
from runner.jax_settings.xla_flags import set_gpu_flags
from runner.monitoring.progress_line import ProgressLine


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    check_chosen(arguments, "experiments/llama_8b")
    if not (_TOPOLOGY.value or _SEARCH.value or _SEARCH_MESH.value or _JSON.value):
        jax.config.update("jax_platforms", "cpu")
        with user_errors():
            print(cost_of(chosen_config()))
        return FINISHED
    with user_errors():
        target = _target()
        if target.accelerator.platform == "cuda":
            check_one_cuda_plugin()
        cfg = without_data(chosen_config())
        targets.prepare(target)
        set_gpu_flags()  # as a run does
    with ProgressLine() as tell:
        report = _report(cfg, target, tell)
    _show(report)
    return FINISHED


def _target() -> Target:
    if not _TOPOLOGY.value:
        raise ConfigError(
            f"give --topology, for example v5e:16x16; there are {', '.join(ACCELERATORS)}"
        )
    target = targets.parse(_TOPOLOGY.value)
    if _NETWORK.value is not None:
        if not 0 < _NETWORK.value < math.inf:
            raise ConfigError(f"--network={_NETWORK.value}: give GB/s above 0, for example 12.5")
        target = target.on_network(_NETWORK.value * 1e9)
    check_axes(_SEARCH_MESH.value)
    if _SEARCH.value and target.accelerator.memory_bytes is None:
        raise ConfigError(f"--search: the memory of {target} is unknown; name an accelerator")
    return target


def _report(cfg: fdl.Config, target: Target, tell: Callable[[str], None]) -> dict[str, Any]:
    """Returns the report's `text` and `json`, from the cache if possible."""
    given = [flag.value for flag in (_NETWORK, _SEARCH, _SEARCH_MESH, _ADVISE, _IMBALANCE)]
    key = kept_plans.key(cfg, target, versions(), *given)
    if not _NO_CACHE.value and (kept := kept_plans.read(key)) is not None:
        tell("showing the cached report of this config and code; --no_cache plans again")
        return kept
    with user_errors():
        with stderr_kept():  # plugins write to stderr as they start
            devices = target.devices()
        experiment = built(cfg, devices)
        check(experiment, target)
    planned = {steps: _of_stage(stage, target, tell) for steps, stage in experiment.stages.items()}
    content = next(iter(planned.values()))[1] if len(planned) == 1 else _of_stages(planned)
    kept_plans.write(key, content)
    return content


def _of_stages(planned: Mapping[range, tuple[Report, dict[str, Any]]]) -> dict[str, Any]:
    """Returns `text` and `json` of a run of several stages."""
    run = WholeRun({steps: report for steps, (report, _) in planned.items()})
    texts, fields = [section("The whole run", str(run))], []
    for steps, (_, content) in planned.items():
        title = f"Steps {steps.start + 1:,} to {steps.stop:,}"
        texts.append(f"{'═' * len(title)}\n{title}\n{'═' * len(title)}\n{content['text']}")
        fields.append({"steps": [steps.start + 1, steps.stop], **content["json"]})
    return {"text": "\n\n".join(texts), "json": {"run": run.as_json(), "stages": fields}}


def _of_stage(
    experiment: Experiment, target: Target, tell: Callable[[str], None]
) -> tuple[Report, dict[str, Any]]:
    """Returns the plan of a stage, and its `text` and `json` with requested searches and advice."""
    imbalance = _IMBALANCE.value
    report = plan(experiment, target, tell, imbalance)
    text, fields = str(report), report.as_json()
    if _SEARCH.value:
        found = search(experiment, target, tell, report, imbalance)
        text += "\n\n" + section("Search", str(found))
        fields["search"] = found.as_json()
    if _SEARCH_MESH.value:
        meshes = search_meshes(experiment, target, _SEARCH_MESH.value, tell, report, imbalance)
        text += "\n\n" + section("Meshes", str(meshes))
        fields["meshes"] = meshes.as_json()
    if _ADVISE.value or report.memory.fits is False:
        advice = advise(experiment, target, report, tell, imbalance)
        text += "\n\n" + section("What needs less memory", str(advice))
        fields["advice"] = advice.as_json()
    return report, {"text": text, "json": fields}


def _show(report: dict[str, Any]) -> None:
    written = json.dumps(report["json"], indent=1)
    if _JSON.value == "-":
        print(written)
        return
    if _JSON.value:
        Path(_JSON.value).write_text(written + "\n", encoding="utf-8")
    print(report["text"])


if __name__ == "__main__":
    run(main)
