"""Nothing of ours unpickles, evaluates or trusts what it reads."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("lmlib", "data_tools", "experiments", "runner", "benchmarks")
SOURCES = {
    file.relative_to(ROOT).as_posix(): file
    for package in PACKAGES
    for file in sorted((ROOT / package).rglob("*.py"))
}

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# By the last names of what is called.
CALLS = {"yaml.load", "yaml.unsafe_load", "torch.load", "os.system", "os.popen"}
# Keywords that nothing may pass, with the value that they may have all the same.
KEYWORDS = {"allow_pickle": False, "trust_remote_code": False, "shell": False}
LOADERS = {"importlib.import_module", "importlib.util.spec_from_file_location", "runpy.run_path"}

# By file: what is allowed there, and why.
EXCEPTIONS = {
    "lmlib/__init__.py": {"importlib.import_module": "one of our own modules, when needed"},
    "lmlib/models/attend/kernel.py": {
        "importlib.import_module": "one of our own modules, when needed"
    },
    "runner/config/saved_config.py": {"importlib.import_module": "after it was found in the list"},
    "runner/config/references.py": {"importlib.import_module": "a module that the user names"},
    "runner/config/configs.py": {
        "importlib.import_module": "the experiment that the user names",
        "importlib.util.spec_from_file_location": "the experiment's file that the user names",
    },
    "runner/__init__.py": {"importlib.import_module": "one of our own two modules, when needed"},
    "lmlib/trackers/__init__.py": {"importlib.import_module": "a package that our own class names"},
    "data_tools/rows/block.py": {
        "importlib.import_module": "the user's --text_function, never a file's",
    },
}


def dotted(node: ast.expr) -> str:
    """`a.b.c` for such an expression; "" for another."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (outer := dotted(node.value)):
        return f"{outer}.{node.attr}"
    return ""


def found(source: str) -> Iterator[str]:
    """What of the above `source` uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from whole & (CALLS | LOADERS)
        else:
            names = []
        yield from (name for name in names if name.partition(".")[0] in MODULES)
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in BUILTINS | LOADERS or ".".join(name.split(".")[-2:]) in CALLS:
                yield name
            for word in node.keywords:
                if word.arg in KEYWORDS:
                    fixed = isinstance(word.value, ast.Constant)
                    if not fixed or word.value.value is not KEYWORDS[word.arg]:
                        yield f"{name}({word.arg}=)"


def test_no_module_runs_what_it_reads() -> None:
    """But for the exceptions, all of which are still needed."""
    uses = {name: set(found(file.read_text(encoding="utf-8"))) for name, file in SOURCES.items()}
    assert {name: what for name, what in uses.items() if what} == {
        name: set(allowed) for name, allowed in EXCEPTIONS.items()
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", "pickle"),
        ("def f():\n    from dill.source import x", "dill.source"),
        ("import numpy as np\nnp.load(x, allow_pickle=True)", "np.load(allow_pickle=)"),
        ("subprocess.run(x, shell=True)", "subprocess.run(shell=)"),
        ("from torch import load", "torch.load"),
        ("eval(x)", "eval"),
        ("from importlib import import_module", "importlib.import_module"),
    ],
)
def test_each_of_them_is_seen(source: str, expected: str) -> None:
    assert list(found(source)) == [expected]


def test_what_is_harmless_is_not_reported() -> None:
    harmless = "import re, ast\nre.compile(x)\nast.literal_eval(x)\nyaml.safe_load(x)\n"
    harmless += "np.load(x, allow_pickle=False)\njax.jit(f).lower(x).compile()\njson.load(x)"
    assert not list(found(harmless))
