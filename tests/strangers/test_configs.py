"""A stranger's config.json: names in it are neither imported nor called."""

import json
import os
import re
import sys

import fiddle as fdl
import pytest
from forked_processes import PATHS, run_forked
from refusals import refusals
from strangers import CANARY, ROOT, leave_canary, sparse, text

from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment, SampleSettings
from runner.config import configs
from runner.errors import ConfigError


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A package on the path that leaves the canary when it is imported."""
    package = tmp_path / "evil"
    package.mkdir()
    (package / "__init__.py").write_text(f"{leave_canary(tmp_path)}\ndef run(*_, **__): ...\n")
    (package / "deeper.py").write_text("def run(*_, **__): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("evil", "evil.deeper"):
        sys.modules.pop(name, None)


def saved(folder):
    synthetic = fdl.Config(Synthetic, vocab_size=64, batch_size=2, sequence_length=5)
    samples = fdl.Config(SampleSettings, prompts=["a"])
    cfg = fdl.Config(Experiment, data=synthetic, samples=samples, steps=3)
    configs.save(cfg, folder / "run")
    return folder / "run" / "config.json"


def naming(folder, module, name):
    """A saved config whose data is made by another function."""
    file = saved(folder)
    rename(file, module, name)
    return file


def rename(file, module, name):
    content = json.loads(file.read_text())
    count = 0

    def replace(value):
        nonlocal count
        if isinstance(value, dict):
            if value.get("name") == "Synthetic":
                value["module"], value["name"] = module, name
                count += 1
            value = list(value.values())
        for part in value if isinstance(value, list) else ():
            replace(part)

    replace(content)
    assert count == 1
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(("module", "name", "told"), refusals(__file__, "hostile"))
def test_the_runner_refuses_what_is_not_listed(evil, module, name, told):
    file = naming(evil, module, name)
    with pytest.raises(ConfigError, match=told) as raised:
        configs.load(str(file))
    assert "\n" not in str(raised.value)
    assert not (evil / CANARY).exists()
    assert "evil" not in sys.modules


def test_trusted_modules_are_imported(evil):
    file = naming(evil, "evil", "run")
    assert fdl.get_callable(configs.load(str(file), trusted=["evil"]).data).__name__ == "run"
    assert (evil / CANARY).exists()


@pytest.mark.parametrize("trusted", ["evi", "evil.deeper", "evil.run.more", ""])
def test_trust_in_one_name_is_none_in_another(evil, trusted):
    file = naming(evil, "evil", "run")
    with pytest.raises(ConfigError, match="--trust_module=evil"):
        configs.load(str(file), trusted=[trusted])
    assert not (evil / CANARY).exists()


@pytest.mark.slow
def test_inspecting_a_run_refuses_it_in_a_line(evil):
    folder = naming(evil, "evil", "run").parent
    paths = {"PYTHONPATH": f"{evil}:{PATHS}"}
    done = run_forked("-m", "runner.inspect", folder, "--batch=0", cwd=evil, environment=paths)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "refers to evil.run" in done.stderr.replace("'", "")
    assert not (evil / CANARY).exists()


# Bombs


def with_prompts(folder, value, objects):
    """A saved config whose data has `value` for its seed, of `objects`."""
    file = saved(folder)
    content = json.loads(file.read_text())
    content["objects"] |= objects
    (data,) = [o for key, o in content["objects"].items() if key.startswith("synthetic")]
    (seed,) = [item for item in data["items"] if "seed" in item[0]]
    seed[1] = value
    file.write_text(json.dumps(content))
    return file


def a_list(*items):
    return {
        "type": {"type": "pyref", "module": "builtins", "name": "list"},
        "items": [[f"Index(index={number})", item] for number, item in enumerate(items)],
        "metadata": {"type": "leaf", "value": None},
    }


def reference(key):
    return {"type": "ref", "key": key}


def doubling(times):
    """Lists that each hold the one before twice."""
    lists = {"list0": a_list({"type": "leaf", "value": 1})}
    for number in range(times):
        lists[f"list{number + 1}"] = a_list(*[reference(f"list{number}")] * 2)
    return lists


def chain(length):
    lists = {"list0": a_list()}
    for number in range(length):
        lists[f"list{number + 1}"] = a_list(reference(f"list{number}"))
    return lists


GRAPHS = {
    "doubling": (reference("list40"), doubling(40)),
    "very deep": (reference("list5000"), chain(5000)),
    "a circle": (reference("list0"), {"list0": a_list(reference("list0"))}),
    "a reference to nothing": (reference("nowhere"), {}),
}


def refused(file):
    with pytest.raises(ConfigError, match="is not a saved Fiddle config") as raised:
        configs.load(str(file))
    assert len(str(raised.value)) < 600
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_would_not_end_is_refused(tmp_path, name):
    refused(with_prompts(tmp_path, *GRAPHS[name]))


@pytest.mark.parametrize(
    "change",
    [
        text("config.json", "[" * 1_000_000),
        text("config.json", '{"root": 1, "root": 2}'),  # a reader may see the first
        text("config.json", "9" * 10_000),
        sparse("config.json", 100 << 30),
    ],
)
def test_odd_json_is_refused(tmp_path, change):
    file = saved(tmp_path)
    change(file.parent)
    refused(file)


def test_special_files_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    refused(tmp_path / "config.json")


def test_no_code_trusts_what_it_reads():
    """Ruff refuses the rest: unpickling, evaluating, and importing by a name from a file."""
    trusting = re.compile(r"(allow_pickle|trust_remote_code)\s*=\s*(?!False\b)")
    assert trusting.search("np.load(x, allow_pickle=True)")
    for package in ("lmlib", "data_tools", "experiments", "runner", "benchmarks"):
        for file in (ROOT / package).rglob("*.py"):
            assert not trusting.search(file.read_text("utf-8")), file
