"""Tells what a run needs on hardware that need not be there: memory, communication, time.

    python -m runner.plan --fdl_config=experiments/llama_8b --topology=v5e:16x16
    python -m runner.plan --fdl_config=experiments/llama_8b --topology=h100:8x8 --search

--fdl_config, --fiddler, --fdl.x.y=…   as for `python -m runner`; the data need not be there
--topology   v5e:16x16, v4:4x4x4, 2xv5e:16x16 (two slices), h100:8x8 (hosts x GPUs of each), cpu:256
--search     looks for the largest microbatch and the least recomputation that fit
--json=FILE  writes the report as JSON too; "-": to stdout, instead of the text
--no_cache   makes the report anew
Compiles the run's own train step, on a CPU, with the compiler of the target; reports are kept in
the user's cache folder. TPUs: pip install 'lmlib[plan-tpu]'; NVIDIA GPUs: 'lmlib[plan-gpu]'.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
from absl import app, flags, logging
from fiddle import absl_flags as absl_flags  # defines --fdl_config and its like

from lmlib.hardware import ACCELERATORS
from lmlib.plan import targets
from lmlib.plan.planner import plan, section, stderr_kept, versions
from lmlib.plan.search import search
from lmlib.plan.targets import Target
from runner import configs
from runner.command_line import parse, tell
from runner.endings import FAILED, FINISHED, MISTAKE
from runner.errors import ConfigError, user_errors
from runner.plan import cache
from runner.plan.absent import built, without_data
from runner.xla_flags import overlap_communication

_TOPOLOGY = flags.DEFINE_string("topology", None, "hardware to plan for: v5e:16x16, h100:8x8")
_SEARCH = flags.DEFINE_bool("search", False, "look for the best settings that fit")
_JSON = flags.DEFINE_string("json", None, "a file for the report as JSON; -: stdout, no text")
_NO_CACHE = flags.DEFINE_bool("no_cache", False, "make the report even if it was made before")
_DEBUG = flags.DEFINE_bool("debug", False, "show the traceback of an error, a mistake's too")
_TRUST_MODULE = flags.DEFINE_multi_string(
    "trust_module", [], "a module of yours that a config.json may refer to; repeatable"
)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0, 1 where planning failed, 2 where the command was wrong."""
    logging.set_verbosity(logging.WARNING)
    try:
        with user_errors():
            target = _target(arguments)
            cfg = without_data(
                configs.load(
                    flags.FLAGS.fdl_config,
                    flags.FLAGS.fiddler,
                    flags.FLAGS.fdl_set,
                    trusted=_TRUST_MODULE.value,
                )
            )
            targets.prepare(target)
            overlap_communication()  # as a run does
        _show(_report(cfg, target))
        return FINISHED
    except ConfigError as error:
        tell(error, _DEBUG.value)
        return MISTAKE
    except (Exception, KeyboardInterrupt) as error:
        tell(error, _DEBUG.value)
        return FAILED


def _target(arguments: Sequence[str]) -> Target:
    if len(arguments) > 1:
        raise ConfigError(f"unknown argument {arguments[1]!r}; flags begin with --")
    if not flags.FLAGS.fdl_config:
        raise ConfigError("give --fdl_config, for example experiments/llama_8b; see --help")
    if not _TOPOLOGY.value:
        raise ConfigError(
            f"give --topology, for example v5e:16x16; there are {', '.join(ACCELERATORS)}"
        )
    target = targets.parse(_TOPOLOGY.value)
    if _SEARCH.value and target.accelerator.memory_bytes is None:
        raise ConfigError(f"--search: how much memory {target} has is unknown; name an accelerator")
    return target


def _report(cfg: fdl.Config, target: Target) -> dict[str, Any]:
    """`text` and `json` of the report; from the cache if it is there."""
    key = cache.key(cfg, target=target, versions=versions(), search=_SEARCH.value)
    if not _NO_CACHE.value and (kept := cache.read(key)) is not None:
        _tell("this report was made before, of the same config, code and versions; --no_cache")
        return kept
    with user_errors():
        with stderr_kept():  # plugins talk as they start
            devices = target.devices()
        experiment = built(cfg, devices)
        experiment.check()
    report = plan(experiment, target, _tell)
    text, fields = str(report), report.as_json()
    if _SEARCH.value:
        found = search(experiment, target, _tell, known=report)
        text += "\n\n" + section("Search", str(found))
        fields["search"] = found.as_json()
    content = {"text": text, "json": fields}
    cache.write(key, content)
    return content


def _show(report: dict[str, Any]) -> None:
    written = json.dumps(report["json"], indent=1)
    if _JSON.value == "-":
        print(written)
        return
    if _JSON.value:
        Path(_JSON.value).write_text(written + "\n", encoding="utf-8")
    print(report["text"])


_BEGAN = time.perf_counter()


def _tell(line: str) -> None:
    print(f"[{time.perf_counter() - _BEGAN:5.1f} s] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # absl shows the module's docstring as --help.
    __doc__ += "\nexperiments:\n" + "\n".join(
        f"  {name:<24} {line}" for name, line in configs.experiments().items()
    )
    app.run(main, flags_parser=parse)
