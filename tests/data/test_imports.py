import subprocess
import sys
from pathlib import Path

import pytest
from sentinels import sentinels

ROOT = Path(__file__).parents[2]

ALL_OF_DATA = """
import sys
from lmlib.data.flat_tokens import FlatTokens
import importlib, pkgutil, lmlib.data
for module in pkgutil.iter_modules(lmlib.data.__path__, "lmlib.data."):
    importlib.import_module(module.name)
slow = {"datasets", "tokenizers"} & set(sys.modules)
ours = ("lmlib.data", "lmlib.storage", "lmlib.row_order")
others = [name for name in sys.modules if name.startswith("lmlib.") and not name.startswith(ours)]
assert FlatTokens and not slow and not others, (slow, others)
"""
WRITING = """
import sys
from lmlib.data.stored.metadata import read_split
from lmlib.data.stored.shard_writer import ShardWriter
assert "jax" not in sys.modules
"""
READING = """
import importlib, pkgutil, sys
import lmlib.data.stored, lmlib.data.text, lmlib.storage
for room in (lmlib.data.stored, lmlib.storage):
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        importlib.import_module(module.name)
assert "lmlib.data.stored.metadata" in sys.modules and "jax" not in sys.modules
"""
CHATS = """
import sys
import lmlib.data.chats.chat
assert "jinja2" not in sys.modules
import lmlib.data.chats.server
assert not {"jax", "datasets", "tokenizers"} & set(sys.modules)
"""
CHAT_SERVER = """
import sys
import lmlib.data.chats.server
assert not {"jax", "numpy", "datasets", "tokenizers"} & set(sys.modules)
"""
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


@pytest.mark.parametrize("code", [ALL_OF_DATA, WRITING, READING, CHATS, CHAT_SERVER])
def test_a_room_imports_nothing_heavy(code):
    run(code)


@pytest.mark.parametrize("command", sentinels(COMMANDS, lambda name: name == "inspect"))
@pytest.mark.parametrize("flag", ["--help", pytest.param("--no_such_flag", marks=pytest.mark.slow)])
def test_help_and_mistakes_come_soon(command, flag):
    run(COMMAND, command, flag, *HEAVY)
