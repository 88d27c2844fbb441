"""Docstrings, comments and pages are in plain English, as docs/contributing.md asks.

The count is a thermometer. It finds phrases that readers stumble over; other libraries of the field
have 0.4 to 0.8 of them per 1,000 words.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERBS = "is|are|was|were|has|have"
MARKS = re.compile(
    r"\b(?:"
    rf"[Ww]hat (?:{VERBS}|a|an|the|each|it|they|no|one|comes?|goes|makes?|[a-z]+s)"
    r"|of which|whereof|lies?|lay|lain|those (?:of|that|which|with|in)|but for"
    rf"|(?:{VERBS}) no (?:longer )?(?=[a-z])|so (?:many|long|much|often)|besides"
    r"|whatever|wherever|whichever|whoever|(?:is|are) (?:told|to be (?:seen|had|told|found))"
    r"|alone|as it(?: is| was)? (?:lies|stands|comes))\b"
)
OPENS = re.compile(r"(?:Of|In|As|Whether|How|What|Which|Where|When|To|From|With)\b")
MOST_MARKS, MOST_OPENINGS = 1.5, 0.03  # per 1,000 words; of all texts


def texts_of_code(file: Path) -> Iterator[str]:
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string[1:].strip()


def texts_of_page(file: Path) -> Iterator[str]:
    """The lines outside of code blocks."""
    outside = re.sub(r"^\s*```.*?^\s*```", "", file.read_text("utf-8"), flags=re.M | re.S)
    yield from (line for line in outside.splitlines() if not line.startswith("    "))


def marks(texts: list[str]) -> float:
    """Per 1,000 words."""
    words = sum(len(text.split()) for text in texts)
    assert words > 10_000, "or this test sees nothing"
    return 1_000 * sum(len(MARKS.findall(text)) for text in texts) / words


def test_code_is_in_plain_english():
    files = [f for name in ("lmlib", "runner", "data_tools") for f in (ROOT / name).rglob("*.py")]
    texts = [text for file in files for text in texts_of_code(file) if text]
    assert marks(texts) <= MOST_MARKS
    assert sum(bool(OPENS.match(text)) for text in texts) <= MOST_OPENINGS * len(texts)


def test_pages_are_in_plain_english():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert marks([text for page in pages for text in texts_of_page(page)]) <= MOST_MARKS
