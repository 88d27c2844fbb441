"""Links of all pages lead somewhere, and names in those about the code exist."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

from lmlib.metrics.meanings import MEANINGS, markdown, meaning

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "docs/architecture.md"
CONTRIBUTING = ROOT / "docs/contributing.md"
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))

# A file, perhaps with the name of something in it: `lmlib/train.py:step`, `tests/update.py`.
FILE = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.(?:py|md))(?::([A-Za-z_][\w.]*\w|\w))?")
FOLDER = re.compile(r"(?<![\w./-])((?:[\w-]+/)+)(?![\w.*-])")
CODE = re.compile(r"`([^`\n]+)`")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)


@functools.cache
def defined_in(file: Path) -> frozenset[str]:
    """Returns names that a Python file defines: "step", "State", and in classes "State.model"."""

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
    """Returns paths in `text`, relative to `folder`, that do not exist."""
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


def linked_from(page: Path) -> set[Path]:
    return {page.parent / name for name, _ in LINK.findall(page.read_text(encoding="utf-8"))}


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of its headings."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for name, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / name if name else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(f"{name}#{anchor}" if anchor else name)
    return broken


def test_the_tour_names_what_exists():
    text = re.sub(LINK, "", ARCHITECTURE.read_text(encoding="utf-8"))
    assert len(FILE.findall(text)) > 60  # or this test sees nothing
    assert not absent(text)
    assert not unknown_words(text)


@pytest.mark.parametrize("page", [CONTRIBUTING, ROOT / "docs/faults.md"])
def test_the_files_that_are_named_are_there(page):
    text = re.sub(LINK, "", page.read_text(encoding="utf-8"))
    assert len(FILE.findall(text)) > 10  # or this test sees nothing
    assert not absent(text)


def test_links_lead_somewhere():
    wrong = {page.name: broken_links(page) for page in (README, *PAGES)}
    assert not {page: links for page, links in wrong.items() if links}


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One, two\n[a](page.md) [b](#one-two) [c](no.md) [d](#two) [e](https://e.org)"
    )
    assert broken_links(page) == ["no.md", "#two"]


def test_the_site_has_every_page():
    def pages(nav):
        if isinstance(nav, str):
            return {nav}
        return set().union(*map(pages, nav.values() if isinstance(nav, dict) else nav))

    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    docs = ROOT / "docs"
    assert pages(nav) == {str(page.relative_to(docs)) for page in docs.rglob("*.md")}


@pytest.mark.parametrize("page", [README, ROOT / "docs/index.md"])
def test_every_page_is_linked_from(page):
    linked = {each.resolve() for each in linked_from(page)}
    assert {*PAGES} - {page} <= linked


def test_the_tutorials_model_is_the_one_that_is_tested():
    tutorial = (ROOT / "docs/your-own-architecture.md").read_text(encoding="utf-8")
    tested = (ROOT / "tests/shared/user_model.py").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n# my_models.py\n(.*?)```", tutorial, re.S)
    assert shown == tested.split('"""\n\n', 1)[1]  # all but its docstring


def test_the_family_that_is_added_is_the_one_that_is_there():
    page = (ROOT / "docs/huggingface.md").read_text(encoding="utf-8")
    section = page.partition("## Add a family")[2].partition("\n## ")[0]
    files = (
        "lmlib/models/families/starcoder.py",
        "lmlib/hf/families.py",
        "tests/shared/hugging_face_families.json",
    )
    there = [(ROOT / file).read_text(encoding="utf-8") for file in files]
    shown = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(shown) == 5
    assert [code for code in shown if not any(code.rstrip() in text for text in there)] == []
    assert not absent(re.sub(LINK, "", section))


def test_the_table_of_running_md_is_that_of_the_code():
    page = (ROOT / "docs/running.md").read_text("utf-8")
    assert "\n".join(markdown()) in page, "put the lines of lmlib.metrics.meanings.markdown() there"


def test_no_metric_is_explained_twice():
    names = [each.name for each in MEANINGS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("loss", "nats per token"),
        ("evaluation_loss/NAME", "nats per token"),
        ("evaluation_loss/code", "nats per token"),
        ("evaluation_tokens_per_second", "1/s"),
        ("grad_norm/layer 3", ""),
        ("step_flops", "FLOPs"),
    ],
)
def test_units(name, unit):
    assert meaning(name).unit == unit


def test_foreign_exceptions_are_not_explained():
    assert meaning("accuracy") is None and meaning("evaluation_accuracy") is None
    assert meaning("loss/3") is None
