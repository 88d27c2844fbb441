import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import lmlib.data
slow = {"datasets", "tokenizers"} & set(sys.modules)
ours = ("lmlib.data", "lmlib.whole_file", "lmlib.storage_failures")
others = [name for name in sys.modules if name.startswith("lmlib.") and not name.startswith(ours)]
assert not slow and not others, (slow, others)
"""


def test_data_stands_alone() -> None:
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=repository, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
