import functools
import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import fiddle as fdl
import jax
import pytest
from fiddle.experimental import serialization

from lmlib.experiment import Experiment
from lmlib.models.attention import Attention
from runner.command_line.errors import ConfigError
from runner.config import configs
from runner.config.configs import load, save
from runner.config.overrides import apply_override
from runner.config.saved_config import FIDDLE_NAMES, JAX_NN
from runner.config.text import changed_paths, difference, flattened

LIBRARY = """
import dataclasses

class Llama:
    def __init__(self, embed: int, layers: int = 2, activation=None, dropout: float = 0, key=None):
        self.embed, self.layers = embed, layers

def silu(x):
    return x

def adamw(peak_lr, betas=(0.9, 0.95), decay: float | None = None, *, nesterov=False):
    return peak_lr

@dataclasses.dataclass
class Files:
    path: str
    names: list = dataclasses.field(default_factory=list)

class Data:
    def __init__(self, files, batch=8, rules={"mlp": "tensor"}, seed: int | None = None):
        self.files, self.batch = files, batch

def evaluate(files, every=100):
    return files

def anything(**settings):
    return settings

class Experiment:
    def __init__(self, model, optimizer, data, validation=None, prompts=(), extra=None, name="run"):
        self.model, self.data, self.validation = model, data, validation
"""

EXPERIMENT = '''
"""A small run.

    python -m runner --fdl_config=…
"""

import fiddle as fdl
from library import Data, Experiment, Files, Llama, adamw, anything, evaluate, silu

def config() -> fdl.Config:
    files = fdl.Config(Files, path="corpus")
    return fdl.Config(
        Experiment,
        model=fdl.Partial(Llama, embed=64, activation=silu),
        optimizer=fdl.Partial(adamw, peak_lr=3e-4),
        data=fdl.Config(Data, files, batch=16),
        validation=[fdl.Config(evaluate, files)],
        prompts=["Once", "The"],
        extra=fdl.Config(anything, one=1),
    )

def tiny(cfg):
    """One layer of embed 8.

    More text.
    """
    cfg.model.embed = 8
    cfg.model.layers = 1

def double(cfg):
    cfg.model.embed *= 2

def scale(cfg, layers, embed=32):
    """Any size."""
    cfg.model.layers, cfg.model.embed = layers, embed

def broken(cfg):
    cfg.model.embedd = 8

def _private(cfg):
    pass
'''

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path, monkeypatch) -> Iterator[Write]:
    """Writes a module into a folder on the Python path; its import is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(source.lstrip("\n"), encoding="utf-8")
        importlib.invalidate_caches()
        return path

    yield write
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def experiment(write) -> str:
    write("library", LIBRARY)
    return str(write("mine", EXPERIMENT))


def error(*arguments, **more) -> str:
    with pytest.raises(ConfigError) as raised:
        load(*arguments, **more)
    return str(raised.value)


# Fiddlers


def test_fiddlers_are_applied_in_order_and_then_the_overrides(experiment):
    assert load(experiment, ["tiny", "double"]).model.embed == 16
    assert load(experiment, ["double", "tiny"]).model.embed == 8
    assert load(experiment, ["double", "tiny"], ["model.embed=24"]).model.embed == 24


def test_a_fiddler_may_be_called_with_literals(experiment):
    model = load(experiment, ["scale(3, embed=1_000)"]).model
    assert (model.layers, model.embed) == (3, 1000)


def test_an_unknown_fiddler_is_answered_with_the_real_ones(experiment):
    message = error(experiment, ["tinny"])
    assert "mine has no fiddler 'tinny'. Did you mean tiny?" in message
    assert "\n    tiny: One layer of embed 8.\n" in message
    assert "\n    scale: Any size." in message
    assert "_private" not in message and "silu" not in message and "config:" not in message


@pytest.mark.parametrize("call", ["tiny(", "scale(layers=open)", "a.b", "scale(*[1])", "3", ""])
def test_a_fiddler_that_is_no_name_or_call_is_refused(experiment, call):
    assert f"--fiddler={call}: write a name, or call it with literals" in error(experiment, [call])


def test_a_fiddler_that_fails_is_named_with_its_line(experiment):
    line = Path(experiment).read_text().splitlines().index("    cfg.model.embedd = 8") + 1
    message = error(experiment, ["broken"])
    assert "--fiddler=broken failed" in message and "embedd" in message
    assert message.endswith(f"({experiment}:{line})")
    assert "missing 1 required positional argument: 'layers'" in error(experiment, ["scale"])


# Overrides


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("optimizer.peak_lr=1e-3", lambda cfg: cfg.optimizer.peak_lr, 1e-3),
        ("optimizer.peak_lr=1", lambda cfg: cfg.optimizer.peak_lr, 1),
        ("optimizer.decay=0.1", lambda cfg: cfg.optimizer.decay, 0.1),
        ("optimizer.decay=None", lambda cfg: cfg.optimizer.decay, None),
        ("optimizer.betas=(0.8, 0.9)", lambda cfg: cfg.optimizer.betas, (0.8, 0.9)),
        ("optimizer.nesterov=True", lambda cfg: cfg.optimizer.nesterov, True),
        ("model.embed=1_024", lambda cfg: cfg.model.embed, 1024),
        ("model.embed=1e3", lambda cfg: cfg.model.embed, 1000),
        ("model.dropout=0.5", lambda cfg: cfg.model.dropout, 0.5),
        ("data.seed=3", lambda cfg: cfg.data.seed, 3),
        ("data.rules['mlp']=fsdp", lambda cfg: cfg.data.rules, {"mlp": "fsdp"}),
        ("data.files.path=/a/b=c", lambda cfg: cfg.data.files.path, "/a/b=c"),
        ("data.files.path='quoted'", lambda cfg: cfg.data.files.path, "quoted"),
        ("data.files.names=['a']", lambda cfg: cfg.data.files.names, ["a"]),
        ("name=unquoted words", lambda cfg: cfg.name, "unquoted words"),
        ("prompts[1]=Then", lambda cfg: cfg.prompts, ["Once", "Then"]),
        ("prompts=['a', 'b']", lambda cfg: cfg.prompts, ["a", "b"]),
        ("validation[0].every=5", lambda cfg: cfg.validation[0].every, 5),
        ("validation=None", lambda cfg: cfg.validation, None),
        ("extra.one=2", lambda cfg: cfg.extra.one, 2),
        ("extra.two=(1,)", lambda cfg: cfg.extra.two, (1,)),
    ],
)
def test_an_override_sets_a_python_literal(experiment, override, read, expected):
    value = read(load(experiment, (), [override]))
    assert value == expected
    assert type(value) is type(expected)


def test_an_element_of_a_tuple_can_be_overridden(experiment):
    assert load(experiment, (), ["optimizer.betas[1]=0.99"]).optimizer.betas == (0.9, 0.99)


def test_parts_left_to_their_defaults_are_overridden_and_saved_as_configs(tmp_path):
    cfg = fdl.Config(Experiment, steps=3)
    apply_override("compute.dtype=float32", cfg)
    save(cfg, tmp_path)
    again = load(str(tmp_path))
    assert flattened(again) == flattened(cfg)
    assert again.compute.dtype == "float32"
    assert fdl.build(again.guard) == Experiment.guard


def test_overriding_part_of_a_default_leaves_the_default_alone(experiment):
    load(experiment, (), ["data.rules['mlp']='fsdp'"])
    assert load(experiment).data.rules == {"mlp": "tensor"}


def test_overriding_a_shared_config_changes_it_everywhere(experiment):
    cfg = load(experiment, (), ["data.files.path=other"])
    assert cfg.validation[0].files.path == "other"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.peek_lr=1", "library.adamw has no 'peek_lr'. Did you mean peak_lr?"),
        ("optimiser.peak_lr=1", "library.Experiment has no 'optimiser'. Did you mean optimizer?"),
        ("model.layer=3", "library.Llama has no 'layer'. Did you mean layers?"),
        ("model.wxyz=3", "There are: embed, layers, activation, dropout, key."),
        ("prompts[7]=a", "has no 7. There are: 0, 1."),
        ("data.rules['mpl']=a", "has no 'mpl'. Did you mean mlp?"),
        ("model.embed.size=1", "64 has no .size"),
        ("extra.three.four=1", "library.anything has no 'three'"),
        ("model=3", "this is a whole config, of library.Llama: change its parameters (embed, "),
        ("model=None", "of type NoneType, but this parameter takes no literal"),
        ("validation[0]=x", "this is a whole config, of library.evaluate"),
        ("model.activation=gelu", "gelu is no Python literal, and this parameter takes None"),
        ("model.embed=abc", "abc is no Python literal, and this parameter takes int (now 64)."),
        ("model.embed='abc'", "'abc' is of type str, but this parameter takes int (now 64)."),
        ("model.embed=1e-3", "1e-3 is of type float, but this parameter takes int (now 64)."),
        ("model.embed=True", "True is of type bool, but this parameter takes int (now 64)."),
        ("model.embed=", " is no Python literal"),
        ("optimizer.nesterov=true", "true is no Python literal, and this parameter takes bool"),
        ("optimizer.betas=[0.9, 0.95]", "is of type list, but this parameter takes tuple"),
        ("prompts=word", """Write "('word',)", with both quotes."""),
        ("validation=a, b", """Write "['a', 'b']", with both quotes."""),
        ("data.seed=inf", "inf is no Python literal"),
        ("data.seed=1.5", "1.5 is of type float, but this parameter takes None or int"),
        ("model.key=abc", """A string is quoted twice: "'abc'"."""),
        ("name=3", """takes str (now 'run'). A string is quoted twice: "'3'"."""),
        ("optimizer.peak_lr", "write it as --fdl.optimizer.peak_lr=1e-3"),
        ("optimizer..peak_lr=1", "write it as --fdl.optimizer.peak_lr=1e-3"),
        ("=1", "write it as --fdl.optimizer.peak_lr=1e-3"),
    ],
)
def test_a_wrong_override_is_answered_with_what_would_be_right(experiment, override, expected):
    message = error(experiment, (), [override])
    assert message.startswith(f"--fdl.{override}: ")
    assert expected in message


# Experiments


def test_an_experiment_is_found_by_any_of_its_names():
    names = ["experiments/llama_84m", "experiments/llama_84m.py", "experiments.llama_84m"]
    texts = {flattened(load(name)) for name in names}
    assert len(texts) == 1


def test_a_shipped_experiment_takes_fiddlers_and_overrides():
    cfg = load("experiments/llama_84m", ["tiny"], ["optimizer.peak_lr=0.125"])
    assert cfg.optimizer.peak_lr == 0.125
    assert changes(load("experiments/llama_84m", ["tiny"]), cfg).count("\n") == 2


def test_an_unknown_experiment_is_answered_with_the_nearest():
    message = error("experiments/lama_84m")
    assert "there is no experiment and no file 'experiments/lama_84m'" in message
    assert "Did you mean experiments/llama_84m" in message


def test_a_user_file_is_found_without_its_suffix_and_run_once(experiment):
    assert load(experiment.removesuffix(".py")) == load(experiment)
    assert load(experiment).model.activation is load(experiment).model.activation


def test_a_user_file_need_not_be_on_the_path(write, tmp_path):
    write("library", LIBRARY)
    (tmp_path / "elsewhere").mkdir()
    file = write("elsewhere/other", EXPERIMENT)
    assert load(str(file)).model.embed == 64


def test_a_user_file_must_not_take_the_name_of_another_module(write, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for name in ("json", "jax"):
        assert "rename it" in error(str(write(f"elsewhere/{name}", EXPERIMENT)))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1", "has no function `def config() -> fdl.Config`"),
        ("def config():\n    return 3", "wrong must return a fdl.Config, and returned 3"),
        ("x = 1\nx.y", "has no attribute 'y' ({file}:2)"),
        ("import missing_module", "No module named 'missing_module' ({file}:1)"),
        ("def config(:", "SyntaxError: invalid syntax (wrong.py, line 1)"),
        ("def config():\n    raise KeyError(1)", "of wrong failed: KeyError: 1 ({file}:2)"),
    ],
)
def test_a_wrong_experiment_is_named_with_the_cause(write, source, expected):
    file = write("wrong", source)
    assert expected.format(file=file) in error(str(file))


# Text


def test_flattened_text_holds_every_parameter_in_declared_order(experiment):
    assert flattened(load(experiment)) == textwrap.dedent("""\
        library.Experiment
        model: library.Llama (partial)
        model.embed = 64
        model.layers = 2
        model.activation = library.silu
        model.dropout = 0
        model.key = None
        optimizer: library.adamw (partial)
        optimizer.peak_lr = 0.0003
        optimizer.betas = (0.9, 0.95)
        optimizer.decay = None
        optimizer.nesterov = False
        data: library.Data
        data.files: library.Files
        data.files.path = 'corpus'
        data.batch = 16
        data.rules = {'mlp': 'tensor'}
        data.seed = None
        validation[0]: library.evaluate
        validation[0].files: same as data.files
        validation[0].every = 100
        prompts = ['Once', 'The']
        extra: library.anything
        extra.one = 1
        name = 'run'
        """)


def test_flattened_text_holds_no_addresses():
    cfg = fdl.Config(dict, a=object(), b=[(len,), {"c": sorted}], d=lambda: 0)
    assert "0x" not in flattened(cfg)
    assert "b = [(builtins.len,), {'c': builtins.sorted}]" in flattened(cfg)


def test_flattening_and_saving_leave_the_config_alone(experiment, tmp_path):
    cfg = load(experiment)
    flattened(cfg)
    save(cfg, tmp_path)
    assert list(fdl.ordered_arguments(cfg.model)) == ["embed", "activation"]


def changes(old, new):
    return difference(flattened(old), flattened(new))


def test_difference_shows_each_changed_line(experiment):
    old, new = load(experiment), load(experiment, (), ["optimizer.peak_lr=1e-3", "extra.two=2"])
    assert changes(old, new) == textwrap.dedent("""\
        - optimizer.peak_lr = 0.0003
        + optimizer.peak_lr = 0.001
        + extra.two = 2
        """)
    assert changed_paths(flattened(old), flattened(new)) == ["optimizer.peak_lr", "extra.two"]


def test_a_difference_does_not_steer_the_terminal():
    assert difference("a = 1\n", "a = \x1b[2J1\n") == "- a = 1\n+ a = \\x1b[2J1\n"


def test_there_is_no_difference_to_defaults_written_out(experiment):
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
    ((block,),) = model.stack
    assert block.attention.scale == 0.5 and block.attention.rotary is not None


def test_a_saved_config_does_not_follow_later_defaults(experiment, write, tmp_path):
    save(load(experiment), tmp_path)
    write("library", LIBRARY.replace("layers: int = 2", "layers: int = 9 "))
    del sys.modules["library"]
    assert load(str(tmp_path), trusted=["library"]).model.layers == 2


def test_the_readable_text_is_saved_and_nothing_unfinished_is_left(experiment, tmp_path):
    workdir = tmp_path / "workdir"
    save(load(experiment), workdir)
    save(load(experiment, ["tiny"]), workdir)
    assert (workdir / "config.txt").read_text() == flattened(load(experiment, ["tiny"]))
    assert sorted(path.name for path in workdir.iterdir()) == [
        "config.json",
        "config.txt",
        "data.json",
    ]


def test_overrides_apply_to_a_saved_config_and_fiddlers_do_not(experiment, tmp_path):
    save(load(experiment), tmp_path)
    assert load(str(tmp_path), (), ["model.layers=7"], ["library"]).model.layers == 7
    assert "fiddlers need an experiment's .py file" in error(str(tmp_path), ["tiny"])


@pytest.mark.parametrize("value", [lambda x: x, object()])
def test_a_value_that_cannot_be_found_again_is_not_saved(tmp_path, value):
    with pytest.raises(ConfigError, match="this config cannot be saved"):
        save(fdl.Config(dict, a=value), tmp_path / "workdir")
    assert not (tmp_path / "workdir").exists()


@pytest.mark.parametrize(
    "content",
    ["", "no JSON", "[]", "{}", "3", '{"root": 1, "objects": {}}', '{"root": {}}', "\xff"],
)
def test_a_json_file_that_is_no_config_is_refused(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content.encode("latin-1"))
    assert "is no saved Fiddle config" in error(str(file))


def test_a_json_file_that_is_not_there_is_refused(tmp_path):
    assert "config.json cannot be read: No such file" in error(str(tmp_path / "config.json"))


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
    assert "needs a scale: give --fdl.scale=…" in error(str(file))
    assert "--fdl.scale=big: big is no Python literal" in error(str(file), overrides=["scale=big"])


def test_every_shipped_experiment_is_saved_and_loaded_again(tmp_path):
    for name in configs.experiments().keys() - {"experiments/from_hf"}:  # which needs a folder
        cfg = load(name)
        save(cfg, tmp_path)
        assert load(str(tmp_path)) == cfg


def test_fiddle_writes_the_private_names_that_are_trusted():
    parts = [
        fdl.Partial(dict),
        fdl.Partial(dict, a=fdl.ArgFactory(dict)),
        fdl.Config(dict, unset=fdl.NO_VALUE),
    ]
    found = set()

    def note(value):
        if isinstance(value, dict):
            if {"module", "name"} <= value.keys():
                found.add(f"{value['module']}.{value['name']}")
            value = list(value.values())
        for part in value if isinstance(value, list) else ():
            note(part)

    note(json.loads(serialization.dump_json(fdl.Config(dict, parts=parts))))
    assert {name for name in found if name.startswith("fiddle")} == FIDDLE_NAMES
    assert jax.nn.gelu.__module__.startswith(f"{JAX_NN}.")
