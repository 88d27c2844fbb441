"""Config texts and saved configs."""

import functools
import importlib
import re
import sys
import textwrap
from pathlib import Path

import fiddle as fdl
import jax
import pytest
from documented_blocks import PAGES, blocks
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from written_experiment import LIBRARY, error

import lmlib.trackers  # noqa: F401, defines the trackers
from lmlib.inspect.layer_norms import LayerNorms
from lmlib.models.parts.attention import Attention
from lmlib.runs import Run
from lmlib.trackers import Tracker
from runner.config import configs
from runner.config.configs import load, save
from runner.config.saved_config import TRUSTED, full_name, is_trusted
from runner.config.text import changed_paths, difference, flattened, settings
from runner.errors import ConfigError

# Text


def test_flattened_text_holds_every_parameter_in_declared_order(experiment):
    expected = Path(__file__).with_name("flattened.txt").read_text()
    assert flattened(load(experiment)) == expected


def changes(old, new):
    return difference(settings(old), settings(new))


def test_difference_shows_each_changed_line(experiment):
    old, new = load(experiment), load(experiment, (), ["optimizer.peak_lr=1e-3", "extra.two=2"])
    assert changes(old, new) == textwrap.dedent("""\
        - optimizer.peak_lr = 0.0003
        + optimizer.peak_lr = 0.001
        + extra.two = 2
        """)
    assert changed_paths(settings(old), settings(new)) == ["optimizer.peak_lr", "extra.two"]
    # Control characters are escaped, and explicit defaults are not a change.
    assert difference({"a": "1"}, {"a": "\x1b[2J1"}) == "- a = 1\n+ a = \\x1b[2J1\n"
    explicit = load(experiment, (), ["model.layers=2", "optimizer.betas=(0.9, 0.95)"])
    assert changes(load(experiment), explicit) == ""


# Saved configs


def test_a_saved_config_is_loaded_again_with_its_sharing(experiment, tmp_path):
    cfg = load(experiment, ["tiny"])
    save(cfg, tmp_path / "new" / "workdir")
    for reference in (tmp_path / "new" / "workdir", tmp_path / "new" / "workdir" / "config.json"):
        again = load(str(reference), trusted=["library"])
        assert again == cfg
        assert changes(cfg, again) == ""
        assert again.data.files is again.validation[0].files
        built = fdl.build(again)
        assert built.data.files is built.validation[0]
        assert built.data.files.names == []
        assert built.model(key=0).layers == 1


def test_a_saved_model_with_a_part_of_its_own_is_built_again(tmp_path):
    cfg = load("experiments/llama_84m", ["tiny"])
    cfg.model.attention = fdl.Partial(Attention, scale=0.5)
    save(cfg, tmp_path)
    again = load(str(tmp_path / "config.json"))
    model = jax.eval_shape(functools.partial(fdl.build(again.model), key=jax.random.key(0)))
    ((block,),) = model.stack.patterns
    assert block.attention.scale == 0.5 and block.attention.rotary is not None


def test_a_saved_config_does_not_follow_later_defaults(experiment, write, tmp_path):
    save(load(experiment), tmp_path)
    write("library", LIBRARY.replace("layers: int = 2", "layers: int = 9 "))
    del sys.modules["library"]
    assert load(str(tmp_path), trusted=["library"]).model.layers == 2


@hypothesis_settings(max_examples=25)
@given(st.text(max_size=20), st.text(max_size=20))
def test_each_setting_is_read_back_by_its_path(tmp_path_factory, key, value):
    """Any names in a dictionary give distinct paths."""
    workdir = tmp_path_factory.mktemp("run")
    part = {"given": value, "none": None, "text": "None", "number": 0.1}
    saved = fdl.Config(dict, sources={key: fdl.Config(dict, **part), f"{key}.": 1}, steps=2)
    save(saved, workdir)
    found = Run(workdir).settings
    at = f"sources[{key!r}]"
    assert found == {
        at: "builtins.dict", f"{at}.given": repr(value), f"{at}.none": "None",
        f"{at}.text": "'None'", f"{at}.number": "0.1", f"sources[{key + '.'!r}]": "1", "steps": "2",
    }  # fmt: skip


def test_the_readable_text_is_saved_and_nothing_unfinished_is_left(experiment, tmp_path):
    workdir = tmp_path / "workdir"
    save(load(experiment), workdir)
    save(load(experiment, ["tiny"]), workdir)
    assert (workdir / "config.txt").read_text() == flattened(load(experiment, ["tiny"]))
    names = {path.name for path in workdir.iterdir()}
    assert names == {"config.json", "config.txt", "settings.json"}


def test_overrides_apply_to_a_saved_config_and_fiddlers_do_not(experiment, tmp_path):
    save(load(experiment), tmp_path)
    assert load(str(tmp_path), (), ["model.layers=7"], ["library"]).model.layers == 7
    assert "fiddlers need an experiment's .py file" in error(str(tmp_path), ["tiny"])


@pytest.mark.parametrize("value", [lambda x: x, object()])
def test_a_value_that_cannot_be_imported_is_not_saved(tmp_path, value):
    with pytest.raises(ConfigError, match="this config cannot be saved"):
        save(fdl.Config(dict, a=value), tmp_path / "workdir")
    assert not (tmp_path / "workdir").exists()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"library"', '"librarian"', "No module named 'librarian'"),
        ('"adamw"', '"adamv"', "module 'library' has no attribute 'adamv'"),
        ('"peak_lr"', '"peek_lr"', "sets 'peek_lr', but library.adamw has none (any more)."),
    ],
)
def test_a_saved_config_must_not_name_what_is_gone(experiment, tmp_path, old, new, expected):
    save(load(experiment), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace(old, new))
    assert expected in error(str(file), trusted=["library", "librarian"])


def test_a_saved_config_with_modules_of_the_user_needs_their_names(experiment, tmp_path):
    save(load(experiment), tmp_path)
    assert error(str(tmp_path)) == (
        f"{tmp_path}/config.json refers to library.silu, which a saved config may not run unasked: "
        "if you trust that code, give --trust_module=library"
    )
    assert "--trust_module=library" in error(str(tmp_path), trusted=["lib", "library.Llama"])


def test_config_is_called_with_the_overrides_of_its_own_parameters(tmp_path):
    file = tmp_path / "scaled.py"
    file.write_text(
        "import fiddle as fdl\n"
        "def made(size: int, name: str):\n"
        "    return size, name\n"
        "def config(scale: int, name: str = 'plain'):\n"
        "    return fdl.Config(made, size=8 * scale, name=name)\n"
        "def doubled(cfg):\n"
        "    cfg.size *= 2\n"
    )
    cfg = load(str(file), ["doubled"], ["scale=3", "size=7", "name=wide"])
    assert fdl.build(cfg) == (7, "wide")
    assert fdl.build(load(str(file), ["doubled"], ["scale=3"])) == (48, "plain")
    assert "scaled has no default for scale: give --fdl.scale=…" in error(str(file))
    assert "--fdl.scale=big: expected" in error(str(file), overrides=["scale=big"])


@pytest.mark.slow
def test_every_shipped_experiment_is_saved_and_loaded_again(tmp_path):
    need_more = {f"experiments/{name}" for name in ("from_hf", "lora", "dpo", "own_text")}
    for name in configs.experiments().keys() - need_more:
        cfg = load(name)
        save(cfg, tmp_path)
        assert load(str(tmp_path)) == cfg


def test_config_parts_in_the_docs_are_trusted():
    """And all trackers."""
    shown = set()
    for block in (block for page in PAGES for block in blocks(page) if block.kind == "python"):
        configured = set(re.findall(r"fdl\.(?:Config|Partial)\(\s*(\w+)[,)]", block.text))
        for module, names in re.findall(r"from (lmlib\S*) import (\([^)]*|.*)", block.text):
            shown |= {(module, name) for name in re.findall(r"\w+", names) if name in configured}
    values = [getattr(importlib.import_module(module), name) for module, name in shown]
    assert len(values) > 10 and LayerNorms in values
    ours = [each for each in Tracker.__subclasses__() if each.__module__.startswith("lmlib.")]
    assert len(ours) == 3
    for value in (*values, *ours):
        assert is_trusted(full_name(value), TRUSTED), value
