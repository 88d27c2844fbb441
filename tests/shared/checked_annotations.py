"""Imports lmlib so that each call checks annotations: beartype types, jaxtyping shapes.

jaxtyping's calls cost several times more, so only functions with shapes have them.
"""

import ast
import copy
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType
from typing import Any

from beartype import beartype
from jaxtyping import AbstractArray, jaxtyped


def check_annotations(package: str) -> None:
    """Checks the annotations of all modules of `package` that are imported from now on."""
    sys.meta_path.insert(0, _Finder(package))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with checks, made at its first call because making all takes seconds."""
    made: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal made
        if made is None:
            made = _checked(function)
        return made(*arguments, **named)

    return call


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # a name that only a type checker knows: jaxtyping passes over it
        return jaxtyped(function, typechecker=beartype)
    if any(map(_has_shape, hints.values())):
        return jaxtyped(function, typechecker=beartype)
    if "<locals>" in function.__qualname__:
        return function
    return beartype(function)


def checked_class(each: type) -> type:
    """`each`, whose `__init__` is checked if dataclasses made it."""
    return jaxtyped(each, typechecker=beartype) if dataclasses.is_dataclass(each) else each


def _has_shape(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(map(_has_shape, typing.get_args(hint)))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str):
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Never reads `__pycache__`, whose code lacks the decorators."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        _decorate(tree)
        return compile(tree, path, "exec", dont_inherit=True)


_CHECKED, _CHECKED_CLASS = (
    ast.parse(f"__import__({__name__!r}).{name}", mode="eval").body
    for name in ("checked", "checked_class")
)
# Fields of a node that hold statements.
_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")


def _decorate(node: ast.AST) -> None:
    """Each function innermost, as it was written; each class outermost, when it is a dataclass."""
    if isinstance(node, ast.FunctionDef):
        node.decorator_list.append(ast.copy_location(copy.copy(_CHECKED), node))
    elif isinstance(node, ast.ClassDef):
        node.decorator_list.insert(0, ast.copy_location(copy.copy(_CHECKED_CLASS), node))
    for block in _BLOCKS:
        for statement in getattr(node, block, ()):
            _decorate(statement)
