"""What the user types, to a Fiddle config, to readable text.

A config comes from an experiment (a module with `config()`) or from the `config.json` of an earlier
run. Fiddlers (the experiment's public functions whose first parameter is `cfg`) change it first,
then overrides (`optimizer.peak_lr=1e-3`). Whatever is misspelt fails before anything is built.
"""

import ast
import contextlib
import copy
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import fiddle as fdl
from fiddle import daglish
from fiddle.experimental import serialization

# The types a Python literal can have: the ones an override can be checked against.
_LITERAL_TYPES = (bool, int, float, str, tuple, list, dict, types.NoneType)
_BAD_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class ConfigError(ValueError):
    """The user's mistake, as a message to print: what, which value, the nearest names."""


def load(reference: str, fiddlers: Sequence[str] = (), overrides: Sequence[str] = ()) -> fdl.Config:
    """The config of `reference`, changed by `fiddlers` and then by `overrides`, each in order.

    `reference` is `experiments/NAME`, `experiments/NAME.py`, `experiments.NAME`, a `.py` file
    anywhere, the `config.json` of an earlier run, or the folder that holds one. A fiddler is a name
    or a call with literals (`scale(layers=4)`); an override is `path=literal`, the quotes optional.

    A file outside `experiments` is imported under its own name; its folder must be on the Python
    path if it needs its neighbours, or if a saved config names what it defines. Raises
    `ConfigError` for whatever the user can have got wrong, inside the experiment too.
    """
    saved = Path(reference, "config.json") if Path(reference).is_dir() else Path(reference)
    if saved.suffix == ".json":
        if fiddlers:
            raise ConfigError(
                f"--fiddler={fiddlers[0]}: fiddlers need an experiment's .py file; {saved} is a "
                "saved config, with those of its run already in it"
            )
        cfg = _read(saved)
    else:
        module = _experiment(reference)
        cfg = _config_of(module)
        for fiddler in fiddlers:
            _apply_fiddler(fiddler, cfg, module)
    for override in overrides:
        _apply_override(override, cfg)
    return cfg


def flattened(cfg: fdl.Config) -> str:
    """Every parameter as a line `path = value`, in declared order, defaults included.

    A line `path: module.name` names the callable of each config; the first line, the root's. Only
    dataclass fields that a default factory fills are left out, until they are set.
    """
    return "\n".join(_lines(_with_defaults(cfg), "", {})) + "\n"


def difference(old: fdl.Config, new: fdl.Config) -> str:
    """The lines of `flattened` that differ, `- old` and `+ new`; empty where the runs are equal."""
    before, after = flattened(old).splitlines(), flattened(new).splitlines()
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return "".join(f"{line[0]} {line[1:]}\n" for line in lines if not line.startswith("@@"))


def save(cfg: fdl.Config, workdir: str | os.PathLike[str]) -> None:
    """Writes `config.json` (for `load`) and `config.txt` (`flattened`), each whole or not at all.

    Defaults are written out: a later run repeats this one even if they have changed since. Raises
    `ConfigError` for a value that no later run could find again, such as a lambda or an array.
    """
    try:
        text = serialization.dump_json(_with_defaults(cfg), indent=1)
    except (serialization.UnserializableValueError, AttributeError, ImportError) as error:
        raise ConfigError(
            "this config cannot be saved: it may hold only literals, and functions and classes at "
            f"the top of an importable module. {error}"
        ) from error
    Path(workdir).mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": text + "\n", "config.txt": flattened(cfg)}.items():
        unfinished = Path(workdir, f".{name}.unfinished")
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(Path(workdir, name))


def experiments() -> dict[str, str]:
    """Name, as `load` takes it, to first docstring line, of every shipped experiment."""
    return {
        name: (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]
        for name, file in _experiment_files().items()
    }


# Experiments and fiddlers.


def _experiment_files() -> dict[str, Path]:
    spec = importlib.util.find_spec("experiments")
    folders = (spec and spec.submodule_search_locations) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("[!_]*.py"))
    return {f"experiments/{file.stem}": file for file in files}


def _experiment(reference: str) -> types.ModuleType:
    shipped = _experiment_files()
    name = reference.removesuffix(".py").replace(".", "/")
    file = Path(reference.removesuffix(".py") + ".py")
    if file.is_file():
        name = next((name for name, other in shipped.items() if other.samefile(file)), "")
    elif name not in shipped:
        raise ConfigError(
            f"there is no experiment and no file {reference!r}. {_did_you_mean(name, shipped)}"
        )
    with _user_code(f"importing {reference}"):
        return importlib.import_module(name.replace("/", ".")) if name else _imported_file(file)


def _imported_file(file: Path) -> types.ModuleType:
    """The module `file`, under its own name; run once, so that its classes stay the same."""
    file, name = file.resolve(), file.stem
    if getattr(sys.modules.get(name), "__file__", None) == str(file):
        return sys.modules[name]
    other = (spec := PathFinder.find_spec(name)) and spec.origin
    if name in sys.stdlib_module_names or (other and Path(other).resolve() != file):
        raise ConfigError(f"{file} has the name of another module, {name!r}; rename it")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _config_of(module: types.ModuleType) -> fdl.Config:
    if not callable(getattr(module, "config", None)):
        raise ConfigError(f"{module.__file__} has no function `def config() -> fdl.Config`")
    with _user_code(f"config() of {module.__name__}"):
        cfg = module.config()
    if not isinstance(cfg, fdl.Config):
        raise ConfigError(
            f"config() of {module.__name__} must return a fdl.Config, and returned {_text(cfg)}"
        )
    return cfg


def _apply_fiddler(text: str, cfg: fdl.Config, module: types.ModuleType) -> None:
    name, positional, named = _parsed_call(text)
    known = _fiddlers(module)
    if name not in known:
        listing = [f"\n    {name}: {line}" for name, (_, line) in known.items()]
        raise ConfigError(
            f"--fiddler={text}: {module.__name__} has no fiddler {name!r}. "
            f"{_did_you_mean(name, known)} Fiddlers are public functions whose first parameter is "
            f"cfg; here:{''.join(listing) or ' none'}"
        )
    with _user_code(f"--fiddler={text}"):
        known[name][0](cfg, *positional, **named)


def _fiddlers(module: types.ModuleType) -> dict[str, tuple[Callable[..., Any], str]]:
    """Name to fiddler and its first docstring line."""
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
    except _BAD_LITERAL:
        pass
    raise ConfigError(f"--fiddler={text}: write a name, or call it with literals: scale(layers=4)")


@contextlib.contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Turns an error in the experiment into a `ConfigError` with the line that raised it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        passed_through = ("<frozen", str(Path(fdl.__file__).parent))
        frames = traceback.extract_tb(error.__traceback__)
        cause = [frame for frame in frames if not frame.filename.startswith(passed_through)][-1]
        where = "" if isinstance(error, SyntaxError) else f" ({cause.filename}:{cause.lineno})"
        raise ConfigError(f"{what} failed: {type(error).__name__}: {error}{where}") from error


# Overrides.


def _apply_override(text: str, cfg: fdl.Config) -> None:
    path, equals, literal = text.partition("=")
    try:
        elements = daglish.parse_path(f".{path.strip()}") if equals else ()
    except ValueError:
        elements = ()
    if not elements:
        raise ConfigError(f"--fdl.{text}: write it as --fdl.optimizer.peak_lr=1e-3")
    try:
        _replaced(cfg, elements, literal.strip())
    except ConfigError as error:
        raise ConfigError(f"--fdl.{text}: {error}") from error


def _replaced(target: Any, path: Sequence[daglish.PathElement], literal: str) -> Any:
    """`target` with `path` replaced: a config in place; containers, perhaps defaults, as copies."""
    element, *rest = path
    if isinstance(target, fdl.Buildable) and isinstance(element, daglish.Attr):
        key, name = element.name, _text(fdl.get_callable(target))
        parts, known = _arguments(target), _parameters(target)
        if _takes_any(target) and not rest:
            known.append(key)
    elif type(target) in (list, tuple, dict) and isinstance(element, daglish.Key):
        key, name = element.key, _text(target)
        parts = dict(target if isinstance(target, dict) else enumerate(target))
        known = list(parts)
    else:
        raise ConfigError(f"{_text(target)} has no {element.code}")
    if key not in known:
        raise ConfigError(f"{name} has no {key!r}. {_did_you_mean(key, known)}")
    present = parts.get(key, fdl.NO_VALUE)
    if rest:
        parts[key] = _replaced(present, rest, literal)
    else:
        parts[key] = _checked(literal, present, _accepted_types(target, key, present))
    if isinstance(target, fdl.Buildable):
        setattr(target, key, parts[key])
        return target
    return type(target)(parts if isinstance(target, dict) else parts.values())


def _checked(literal: str, present: Any, accepted: set[type] | None) -> Any:
    """The value of `literal`, of one of the `accepted` types (None: of any)."""
    takes = " or ".join(sorted(kind.__name__.removesuffix("Type") for kind in accepted or ()))
    takes = f"this parameter takes {takes or 'no literal: change it in a fiddler'}"
    takes += "" if present is fdl.NO_VALUE else f" (now {_text(present)})"
    string = f"""A string is quoted twice: "{literal!r}"."""
    if isinstance(present, fdl.Buildable) and literal != "None":
        raise ConfigError(
            f"this is a whole config, of {_text(fdl.get_callable(present))}: change its parameters "
            f"({', '.join(_parameters(present))}), or replace it in a fiddler"
        )
    try:
        value = ast.literal_eval(literal)
    except _BAD_LITERAL:
        if str in (accepted or ()):
            return literal
        raise ConfigError(f"{literal} is no Python literal, and {takes}. {string}") from None
    kind = type(value)
    if accepted is None or kind in accepted or (kind is int and float in accepted):
        return value
    string = f" {string}" if str in accepted else ""
    raise ConfigError(f"{literal} is of type {kind.__name__}, but {takes}.{string}")


def _accepted_types(target: Any, key: Any, present: Any) -> set[type] | None:
    """Those of the annotation, the default and the present value; None where nothing is known."""
    annotation, default = Any, fdl.NO_VALUE
    if isinstance(target, fdl.Buildable) and (parameter := _signature(target).get(key)):
        annotation, default = parameter.annotation, parameter.default
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    kinds = {typing.get_origin(member) or member for member in members}
    if (present is None or present is fdl.NO_VALUE) and not kinds <= set(_LITERAL_TYPES):
        return None
    return (kinds | {type(present), type(default)}) & set(_LITERAL_TYPES)


def _nodes(value: Any) -> list[fdl.Buildable]:
    return [node for node, _ in daglish.iterate(value) if isinstance(node, fdl.Buildable)]


def _signature(node: fdl.Buildable) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(fdl.get_callable(node), eval_str=True).parameters)
    except NameError:  # an annotation that only a type checker can resolve
        return dict(inspect.signature(fdl.get_callable(node)).parameters)


def _parameters(node: fdl.Buildable) -> list[str]:
    """Names that can be set, or have been (where the callable takes any), in declared order."""
    settable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [name for name, parameter in _signature(node).items() if parameter.kind in settable]
    more = fdl.ordered_arguments(node) if _takes_any(node) else ()
    return names + [name for name in more if isinstance(name, str) and name not in names]


def _takes_any(node: fdl.Buildable) -> bool:
    """Whether the callable has `**kwargs`."""
    return any(each.kind is each.VAR_KEYWORD for each in _signature(node).values())


def _arguments(node: fdl.Buildable) -> dict[Any, Any]:
    """What is set or has a default, in declared order; not what a default factory would make."""
    function, given = fdl.get_callable(node), fdl.ordered_arguments(node)
    fields = dataclasses.fields(function) if dataclasses.is_dataclass(function) else ()
    made = {field.name for field in fields if field.default_factory is not dataclasses.MISSING}
    arguments = fdl.ordered_arguments(node, include_defaults=True)
    return {name: arguments[name] for name in arguments if name in given or name not in made}


def _with_defaults(cfg: fdl.Config) -> fdl.Config:
    """A copy with every default set. (Fiddle's own function sets a mark for default factories.)"""
    cfg = copy.deepcopy(cfg)
    for node in _nodes(cfg):
        for name, value in _arguments(node).items():
            if isinstance(name, str):  # a number for what is positional only
                setattr(node, name, value)
    return cfg


def _read(file: Path) -> fdl.Config:
    try:
        cfg = serialization.load_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ImportError, AttributeError) as error:
        missing = str(error).partition("\n")[0]
        raise ConfigError(f"{file}: {missing}. If it is yours, set PYTHONPATH.") from error
    except Exception as error:
        raise ConfigError(f"{file} is no saved Fiddle config ({type(error).__name__})") from error
    if not isinstance(cfg, fdl.Config):
        raise ConfigError(f"{file} is no saved Fiddle config: it holds a {type(cfg).__name__}")
    for node in _nodes(cfg):
        known, owner = _parameters(node), _text(fdl.get_callable(node))
        for name in set(fdl.ordered_arguments(node, include_positional=False)) - set(known):
            near = _did_you_mean(name, known)
            raise ConfigError(f"{file} sets {name!r}, but {owner} has none (any more). {near}")
    return cfg


def _lines(value: Any, path: str, seen: dict[int, str]) -> Iterator[str]:
    """Lines of `flattened`; `seen` maps each config already written to its path."""
    if not _nodes(value):
        yield f"{path} = {_text(value)}"
        return
    if isinstance(value, fdl.Buildable):
        prefix = f"{path}: " if path else ""
        if id(value) in seen:
            yield f"{prefix}same as {seen[id(value)]}"
            return
        seen[id(value)] = path
        kind = "" if isinstance(value, fdl.Config) else f" ({type(value).__name__.lower()})"
        yield f"{prefix}{_text(fdl.get_callable(value))}{kind}"
    traverser = daglish.find_node_traverser(type(value))
    assert traverser
    parts, _ = traverser.flatten(value)
    for element, part in zip(traverser.path_elements(value), parts, strict=True):
        yield from _lines(part, f"{path}{element.code}".removeprefix("."), seen)


def _text(value: Any) -> str:
    """`repr` without addresses: functions and classes by their names."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(part)}" for key, part in value.items()) + "}"
    if type(value) in (tuple, list):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return opening + ", ".join(map(_text, value)) + comma + closing
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _did_you_mean(name: object, choices: Iterable[object]) -> str:
    names = [str(choice) for choice in choices]
    if near := difflib.get_close_matches(str(name), names, n=3):
        return f"Did you mean {' or '.join(near)}?"
    return f"There are: {', '.join(names)}." if names else "There are none."
