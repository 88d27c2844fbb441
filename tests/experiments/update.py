"""Writes the golden texts anew: python tests/experiments/update.py"""

from pathlib import Path

from runner.config import configs
from runner.config.text import flattened

golden = Path(__file__).parent / "golden"
golden.mkdir(exist_ok=True)
for name in configs.experiments():
    text = flattened(configs.load(name))
    (golden / f"{name.removeprefix('experiments/')}.txt").write_text(text)
