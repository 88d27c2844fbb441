"""Names of files, and of what is in them, in docs/architecture.md and in README's table exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "docs/architecture.md"
README = ROOT / "README.md"
TABLE = "## Where things are"

# A file, perhaps with the name of something in it: `lmlib/train.py:step`, `tests/update.py`.
FILE = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.(?:py|md))(?::([A-Za-z_][\w.]*\w|\w))?")
FOLDER = re.compile(r"(?<![\w./-])((?:[\w-]+/)+)(?![\w.*-])")
CODE = re.compile(r"`([^`\n]+)`")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
LINK = re.compile(r"\[[^\]]*\]\(([\w./-]+)\)")


@functools.cache
def defined_in(file: Path) -> frozenset[str]:
    """What a file of Python defines: "step", "State", and of classes "State.model"."""

    def names(body: list[ast.stmt], prefix: str = "") -> set[str]:
        found = set()
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.add(prefix + node.name)
                case ast.ClassDef():
                    found.add(prefix + node.name)
                    found |= names(node.body, f"{prefix}{node.name}.")
                case ast.Assign():
                    found |= {prefix + one.id for one in node.targets if isinstance(one, ast.Name)}
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(prefix + name)
        return found

    return frozenset(names(ast.parse(file.read_text(encoding="utf-8")).body))


@functools.cache
def words_of_the_code() -> frozenset[str]:
    folders = ("lmlib", "experiments", "data_tools", "runner")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return frozenset(re.findall(r"\w+", "\n".join(file.read_text("utf-8") for file in files)))


def absent(text: str, folder: Path = ROOT) -> list[str]:
    """What `text` names by a path relative to `folder`, and is not there."""
    wrong = []
    for name, member in FILE.findall(text):
        file = folder / name
        if not file.is_file():
            wrong.append(name)
        elif member and member not in defined_in(file):
            wrong.append(f"{name}:{member}")
    return wrong + [name for name in FOLDER.findall(text) if not (folder / name).is_dir()]


def unknown_words(text: str) -> list[str]:
    """Identifiers in backticks, `gather` or `cfg.compute`, that the code does not have."""
    return [
        code
        for code in CODE.findall(text)
        if IDENTIFIER.fullmatch(code)
        and not set(re.findall(r"\w+", code)) <= {*words_of_the_code(), "cfg"}
    ]


def table_of_places(readme: str) -> str:
    rows = readme.partition(TABLE)[2].partition("\n\nImports")[0]
    assert rows.count("\n|") > 10  # or this test sees nothing
    return rows


def test_the_tour_names_what_exists():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    linked = re.sub(LINK, "", text)
    assert len(FILE.findall(linked)) > 60  # or this test sees nothing
    assert not absent(linked)
    assert not unknown_words(linked)
    assert not [name for name in LINK.findall(text) if not (ARCHITECTURE.parent / name).exists()]


def test_readme_says_where_things_are():
    text = README.read_text(encoding="utf-8")
    assert not absent(table_of_places(text))
    assert not [name for name in LINK.findall(text) if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`lmlib/train.py:step`, lmlib/guard.py and `lmlib/data/`", []),
        ("`lmlib/state.py:State.model`", []),
        ("`lmlib/train.py:stride`", ["lmlib/train.py:stride"]),
        ("`lmlib/state.py:State.modal`", ["lmlib/state.py:State.modal"]),
        ("see lmlib/training.py", ["lmlib/training.py"]),
        ("| `lmlib/dater/` |", ["lmlib/dater/"]),
    ],
)
def test_a_wrong_name_is_found(text, wrong):
    assert absent(text) == wrong


def test_a_wrong_word_is_found():
    assert unknown_words("`gather`, `cfg.compute`, `gatherer`, `a + b`") == ["gatherer"]


def test_the_tutorials_model_is_the_one_that_is_tested():
    tutorial = (ROOT / "docs/your-own-architecture.md").read_text(encoding="utf-8")
    tested = (ROOT / "tests/shared/user_model.py").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n# my_models.py\n(.*?)```", tutorial, re.S)
    assert shown == tested.split('"""\n\n', 1)[1]  # all but its docstring


def test_the_family_that_is_added_is_the_one_that_is_there():
    page = (ROOT / "docs/huggingface.md").read_text(encoding="utf-8")
    section = page.partition("## Add a family")[2].partition("\n## ")[0]
    files = ("models/families/starcoder.py", "hf/families/starcoder.py", "hf/families/__init__.py")
    there = [(ROOT / "lmlib" / file).read_text(encoding="utf-8") for file in files]
    there.append((ROOT / "tests/shared/hugging_face_families.py").read_text(encoding="utf-8"))
    shown = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(shown) == 6
    assert [code for code in shown if not any(code.rstrip() in text for text in there)] == []
    assert not absent(re.sub(LINK, "", section))
