import subprocess
import sys
from pathlib import Path

import pytest
from sentinels import sentinels

ROOT = Path(__file__).parents[2]
ROOM = """
import importlib, pkgutil, sys
places, heavy = (each.split() for each in sys.argv[1:])
for name in places:
    for inside in pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", ())):
        importlib.import_module(f"{name}.{inside.name}")
assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)
"""
ROOMS = [
    ("lmlib.data", "datasets tokenizers"),
    ("lmlib.data.stored lmlib.data.text lmlib.storage", "jax"),
    ("lmlib.data.chats.chat", "jinja2 jax datasets tokenizers"),
    ("lmlib.data.chats.server", "jax numpy datasets tokenizers"),
]
HEAVY = "jax", "jaxlib", "datasets", "pandas", "pyarrow", "transformers", "torch"
COMMAND = """
import runpy, sys
command, flag, *heavy = sys.argv[1:]
sys.argv = [command, flag]
try:
    runpy.run_module(f"data_tools.{command}", run_name="__main__")
except SystemExit as ended:
    assert ended.code == (0 if flag == "--help" else 2), ended.code
assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)
"""
COMMANDS = [file.parent.name for file in (ROOT / "data_tools").glob("*/__main__.py")]


def run(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("places", "heavy"), ROOMS)
def test_a_room_imports_nothing_heavy(places, heavy):
    run(ROOM, places, heavy)


@pytest.mark.parametrize("command", sentinels(COMMANDS, lambda name: name == "inspect"))
@pytest.mark.parametrize("flag", ["--help", pytest.param("--no_such_flag", marks=pytest.mark.slow)])
def test_help_and_mistakes_come_soon(command, flag):
    run(COMMAND, command, flag, *HEAVY)
