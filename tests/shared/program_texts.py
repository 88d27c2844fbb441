"""Texts of compiled programs that no compiler here makes, in tests/plan/programs."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "plan" / "programs"


def program_text(name: str, **changes: str) -> str:
    """The program `name`, with each word in `changes` replaced."""
    text = (FOLDER / f"{name}.hlo").read_text()
    for word, value in changes.items():
        text = text.replace(word, value)
    return text
