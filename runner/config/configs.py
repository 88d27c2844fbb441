"""Loads configs from the command line's references, fiddlers and overrides, and saves them.

A config comes from an experiment (a module with `config()`) or from the `config.json` of an earlier
run. Fiddlers (the experiment's public functions whose first parameter is `cfg`) change it first,
then overrides (`optimizer.peak_lr=1e-3`). Spelling mistakes fail before anything is built.

An experiment's file is code, and it is executed. A `config.json` may come from a stranger, so it
is refused if it names anything except the parts of configs (`runner.config.saved_config`). Name
modules of your own when you load such a file: `--fdl_config=RUN/config.json
--trust_module=my_models`.
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import fiddle as fdl
from fiddle.experimental import serialization

from lmlib.runs.settings import FILE_NAME as SETTINGS
from lmlib.storage.atomic_file import make_folder, write_atomically
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import folder_to_read
from runner.config.overrides import BAD_LITERAL, apply_override, check_values
from runner.config.saved_config import read_config
from runner.config.text import flattened, parameters, settings, text_of, with_defaults
from runner.errors import ConfigError, did_you_mean, error_text, user_errors

# Modules whose errors are written for users.
_OURS = tuple(
    f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("lmlib", "data_tools", "experiments")
)


def load(
    reference: str,
    fiddlers: Sequence[str] = (),
    overrides: Sequence[str] = (),
    trusted: Collection[str] = (),
) -> fdl.Config:
    """Loads the config of `reference`, then applies `fiddlers` and `overrides` in order.

    Overrides of parameters of `config` itself become its arguments. If such a parameter takes a
    config, its override names a saved model; a `Sequence[Family]` gets the known families. A file
    outside `experiments` is imported under its own name, with its folder on the Python path. Raises
    ConfigError for any mistake of the user, also inside the experiment.

    Args:
      reference: `experiments/NAME`, `experiments/NAME.py`, `experiments.NAME`, any `.py` file, the
        `config.json` of an earlier run, or the folder that holds one.
      fiddlers: names, or calls with literals (`scale(layers=4)`).
      overrides: `path=literal`; quotes are optional.
      trusted: modules that a `config.json` may name in addition to ours; "my_models" trusts all of
        it.
    """
    if BucketUrl.parsed(reference) is not None:  # the folder of a run, or its config.json
        with user_errors():
            reference = str(folder_to_read(reference.removesuffix("/config.json")))
    saved = Path(reference, "config.json") if os.path.isdir(reference) else Path(reference)
    if saved.suffix == ".json":
        if fiddlers:
            raise ConfigError(
                f"--fiddler={fiddlers[0]}: fiddlers need an experiment's .py file; {saved} is a "
                "saved config, with those of its run already in it"
            )
        cfg = read_config(saved, trusted)
    else:
        module = _experiment(reference)
        cfg, overrides = _config_of(module, overrides, trusted)
        for fiddler in fiddlers:
            _apply_fiddler(fiddler, cfg, module)
    for override in overrides:
        apply_override(override, cfg)
    check_values(cfg)
    return cfg


def save(cfg: fdl.Config, workdir: str | os.PathLike[str]) -> None:
    """Writes `saved_files` atomically, one by one; raises ConfigError as `saved_files` does."""
    contents = saved_files(cfg)
    make_folder(workdir)
    for name, content in contents.items():
        write_atomically(Path(workdir, name), content)


def saved_files(cfg: fdl.Config) -> dict[str, str]:
    """Returns the content of config.json, settings.json and config.txt by file name.

    `load` reads config.json; the others hold `settings` and, for people, `flattened`. Defaults are
    written out, so that a later run repeats this one even if defaults have changed. Raises
    ConfigError for a value that a later run could not import, such as a lambda or an array.
    """
    try:
        text = serialization.dump_json(with_defaults(cfg), indent=1)
    except (serialization.UnserializableValueError, AttributeError, ImportError) as error:
        raise ConfigError(
            "this config cannot be saved: it may hold only literals, and functions and classes at "
            f"the top of an importable module. {error}"
        ) from error
    return {
        "config.json": text + "\n",
        SETTINGS: json.dumps(settings(cfg), indent=0) + "\n",
        "config.txt": flattened(cfg),
    }


def experiments() -> dict[str, Path]:
    """Returns the file of each shipped experiment, by the reference that `load` takes."""
    spec = importlib.util.find_spec("experiments")
    folders = (spec and spec.submodule_search_locations) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("[!_]*.py"))
    return {f"experiments/{file.stem}": file for file in files}


def experiment_file(reference: str) -> Path | None:
    """Returns the code file that `load` would execute; `None` for saved configs, or if missing."""
    file = Path(reference.removesuffix(".py") + ".py")
    if os.path.isfile(file):  # unlike `Path.is_file`, does not raise if the name is too long
        return file
    return experiments().get(reference.removesuffix(".py").replace(".", "/"))


def fiddlers(reference: str) -> dict[str, str]:
    """Returns the fiddlers of an experiment, each with the first line of its docstring.

    A saved config has none. Raises `ConfigError` as `load` does.
    """
    if reference.endswith(".json") or os.path.isdir(reference):
        return {}
    return {name: line for name, (_, line) in _fiddlers(_experiment(reference)).items()}


def yielded(reference: str, name: str) -> list[Any] | None:
    """Calls the generator `name` of an experiment and lists its values; `None` if missing.

    Raises `ConfigError` as `load` does, and if the function fails.
    """
    if reference.endswith(".json") or os.path.isdir(reference):
        return None
    module = _experiment(reference)
    function = getattr(module, name, None)
    if not callable(function):
        return None
    with _user_code(f"{name}() of {module.__name__}"):
        return list(function())


def _experiment(reference: str) -> types.ModuleType:
    shipped = experiments()
    name = reference.removesuffix(".py").replace(".", "/")
    file = Path(reference.removesuffix(".py") + ".py")
    if os.path.isfile(file):  # `Path.is_file` raises if the name is too long
        name = next((name for name, other in shipped.items() if other.samefile(file)), "")
    elif name not in shipped:
        raise ConfigError(
            f"no experiment or file is called {reference!r}. {did_you_mean(name, shipped)}"
        )
    with _user_code(f"importing {reference}"):
        return importlib.import_module(name.replace("/", ".")) if name else _imported_file(file)


def _imported_file(file: Path) -> types.ModuleType:
    """Imports `file` under its own name, once, so that its classes stay the same."""
    file, name = file.resolve(), file.stem
    if getattr(sys.modules.get(name), "__file__", None) == str(file):
        return sys.modules[name]
    other = (spec := PathFinder.find_spec(name)) and spec.origin
    if name in sys.stdlib_module_names or (other and Path(other).resolve() != file):
        raise ConfigError(f"{file} has the name of another module, {name!r}; rename it")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def config_of_model(reference: str, trusted: Collection[str] = ()) -> fdl.Config:
    """Returns the config of a saved model, with its weights as `init_from`.

    Raises ConfigError if there is no such model, or it consists only of adapters.

    Args:
      reference: a run, `RUN@STEP`, a Hugging Face folder or a name on the Hub.
      trusted: as in `load`.
    """
    from runner.config.references import FolderReference, base_of, resolve  # which imports JAX

    found = resolve(reference)
    if isinstance(found, FolderReference):
        if base_of(found) is not found:
            raise ConfigError(
                f"{reference} contains only adapters; convert it to a run: "
                f"python -m runner.convert --from={reference} --to=RUN"
            )
        return load("experiments/from_hf", (), [f"folder={found.name!r}"], trusted)
    run = found.folder.parent.absolute()
    cfg = load(str(run / "config.json"), trusted=trusted)
    cfg.init_from = str(run) if found.step is None else f"{run}@{found.step}"
    cfg.continue_optimizer = False
    return cfg


def _config_of(
    module: types.ModuleType, overrides: Sequence[str], trusted: Collection[str]
) -> tuple[fdl.Config, Sequence[str]]:
    """Calls `config`; returns its result, and the overrides that are not its own parameters."""
    if not callable(getattr(module, "config", None)):
        raise ConfigError(f"{module.__file__} has no function `def config() -> fdl.Config`")
    call, kinds = fdl.Config(module.config), typing.get_type_hints(module.config)
    with_families = {name for name in parameters(call) if _is_of_families(kinds.get(name))}
    names = set(parameters(call)) - with_families
    own = [each for each in overrides if each.partition("=")[0].strip() in names]
    for override in own:
        apply_override(override, call)
    if with_families:
        from runner.config.references import known_families

        for name in with_families:
            setattr(call, name, known_families(trusted))
    given = fdl.ordered_arguments(call, include_defaults=True)
    if missing := [name for name in parameters(call) if name not in given]:
        raise ConfigError(
            f"{module.__name__} has no default for {missing[0]}: give --fdl.{missing[0]}=…"
        )
    for name, value in given.items():
        if isinstance(value, str) and _is_config(kinds.get(name)):
            given[name] = config_of_model(value, trusted)
    with _user_code(f"config() of {module.__name__}"):
        cfg = module.config(**given)
    if not isinstance(cfg, fdl.Config):
        raise ConfigError(
            f"config() of {module.__name__} must return a fdl.Config, and returned {text_of(cfg)}"
        )
    return cfg, [each for each in overrides if each not in own]


def _is_config(kind: Any) -> bool:
    """True if an annotation is a config, or an optional one."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if union else (kind,)
    return any((typing.get_origin(each) or each) is fdl.Config for each in kinds)


def _is_of_families(kind: Any) -> bool:
    """True if an annotation is `Sequence[Family]`; lmlib.hf is imported only if it is needed."""
    names = [
        f"{e.__module__}.{e.__qualname__}" for e in typing.get_args(kind) if isinstance(e, type)
    ]
    family = "lmlib.models.families.hugging_face.family.Family"
    return typing.get_origin(kind) is Sequence and names == [family]


def _apply_fiddler(text: str, cfg: fdl.Config, module: types.ModuleType) -> None:
    name, positional, named = _parsed_call(text)
    known = _fiddlers(module)
    if name not in known:
        listing = [f"\n    {name}: {line}" for name, (_, line) in known.items()]
        raise ConfigError(
            f"--fiddler={text}: {module.__name__} has no fiddler {name!r}. "
            f"{did_you_mean(name, known)} Fiddlers are public functions whose first parameter is "
            f"cfg; here:{''.join(listing) or ' none'}"
        )
    with _user_code(f"--fiddler={text}"):
        known[name][0](cfg, *positional, **named)


def _fiddlers(module: types.ModuleType) -> dict[str, tuple[Callable[..., Any], str]]:
    """Returns each fiddler with the first line of its docstring, by name."""
    return {
        name: (function, (inspect.getdoc(function) or "").partition("\n")[0])
        for name, function in vars(module).items()
        if inspect.isfunction(function) and not name.startswith("_")
        if list(inspect.signature(function).parameters)[:1] == ["cfg"]
    }


def _parsed_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    try:
        call = ast.parse(text if "(" in text else f"{text}()", mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            return call.func.id, [ast.literal_eval(value) for value in call.args], named
    except BAD_LITERAL:
        pass
    raise ConfigError(f"--fiddler={text}: write a name, or call it with literals: scale(layers=4)")


@contextlib.contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Turns an error in the experiment into a `ConfigError` with the failing line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        passed_through = ("<frozen", str(Path(fdl.__file__).parent))
        frames = traceback.extract_tb(error.__traceback__)
        cause = [frame for frame in frames if not frame.filename.startswith(passed_through)][-1]
        if isinstance(error, (ValueError, OSError)) and cause.filename.startswith(_OURS):
            raise ConfigError(error_text(error)) from error
        where = "" if isinstance(error, SyntaxError) else f" ({cause.filename}:{cause.lineno})"
        raise ConfigError(f"{what} failed: {type(error).__name__}: {error}{where}") from error


def later_stages(cfg: fdl.Config) -> list[Any]:
    """Returns the configs of the stages after the first."""
    return list(getattr(cfg, "later_stages", ()))


def training_data(cfg: fdl.Config) -> list[Any]:
    """Returns the configs of the data of each stage, in order."""
    return [cfg.data, *(stage.data for stage in later_stages(cfg))]


def longest_row(cfg: fdl.Config) -> int | None:
    """Returns the length of a run's longest training rows in tokens; `None` if it is unknown."""
    lengths = (getattr(data, "sequence_length", None) for data in training_data(cfg))
    return max((length for length in lengths if isinstance(length, int)), default=None)
