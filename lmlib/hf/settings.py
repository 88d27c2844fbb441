"""The keys of a config.json: each is used, known to be without effect, or refused."""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from lmlib.hf.folder import FolderError
from lmlib.hf.without_effect import AT_REST, WITHOUT_EFFECT

_LARGEST: dict[type, int | float] = {int: 2**31 - 1, float: sys.float_info.max}
_NOT_GIVEN = object()
MOST_LAYERS = 10_000  # more would fill memory before anything is compared with the tensors
LARGEST_EPSILON = 1.0  # what a norm adds; with more it would hardly be one
_SHOWN = 5  # of the keys that are not known


class Settings:
    """Reads a config and remembers which keys were asked for."""

    def __init__(
        self,
        content: Mapping[str, Any],
        where: str,
        without_effect: Collection[str] = WITHOUT_EFFECT,
    ):
        """
        Args:
          where: the file, for messages.
          without_effect: keys that need not be asked for.
        """
        self._content, self.where = dict(content), where
        self._left = set(content) - set(without_effect)

    def take(
        self,
        key: str,
        default: Any = _NOT_GIVEN,
        kind: type = int,
        zero: bool = False,
        most: int | float | None = None,
    ) -> Any:
        """The value of `key`, or `default` where it is absent.

        Null is refused: transformers does not read it as the default. Only where that is `None` or
        an empty dict are null and an absent key the same.

        Args:
          kind: of the value: `int`, `float`, `bool`, `list` or `dict`.
          zero: whether a number may be 0; none may be negative or infinite.
          most: the largest number; `None`: the largest that its kind has, int32's of `int`.

        Raises:
          FolderError: if it is neither there nor has a default, or is not of `kind`.
        """
        self._left.discard(key)
        value = self._content.get(key)
        if value is None:
            if default is _NOT_GIVEN:
                raise FolderError(f"{self.where} has no {key}")
            if key in self._content and default not in (None, {}):
                raise FolderError(
                    f"{self.where}: {key} = null is no {kind.__name__}: without the key it would "
                    f"be {default!r:.200}"
                )
            return default
        if type(value) not in ((int, float) if kind is float else (kind,)):
            raise FolderError(f"{self.where}: {key} = {value!r:.200} is no {kind.__name__}")
        if kind not in _LARGEST:
            return value
        largest = _LARGEST[kind] if most is None else most
        if not 0 <= value <= largest or (value == 0 and not zero):
            raise FolderError(
                f"{self.where}: {key} = {value!r:.200} makes no sense: it must be "
                f"{'at least' if zero else 'above'} 0, and at most {largest}"
            )
        return kind(value)

    def nullable(self, key: str, absent: Any = _NOT_GIVEN, kind: type = int) -> Any:
        """The value of `key`, `None` where it is null, `absent` where it is not there."""
        self._left.discard(key)
        return None if self._content.get(key, absent) is None else self.take(key, absent, kind)

    def flag(self, key: str, absent: bool) -> bool:
        """The bool of `key`, `absent` where it is not there. Null is False, as in a condition of
        Python."""
        return bool(self.nullable(key, absent, bool))

    def only(self, key: str, *accepted: Any) -> Any:
        """The value of `key`, which must be absent or one of `accepted`; with none of these, null.

        Raises:
          FolderError: naming key and value.
        """
        self._left.discard(key)
        value = self._content.get(key)
        if key in self._content and value not in (accepted or (None,)):
            choices = " or ".join(
                "null" if each is None else repr(each) for each in accepted or (None,)
            )
            raise FolderError(
                f"{self.where}: {key} = {value!r:.200} is not supported, only {choices}"
            )
        return value

    def ignore(self, *keys: str) -> None:
        """Of this family, these have no effect."""
        self._left.difference_update(keys)

    def done(self) -> None:
        """Raises FolderError if a key was not asked for."""
        for key, value in AT_REST.items():
            if key in self._left:
                self.only(key, value, None)
        if self._left:
            shown = sorted(self._left)[:_SHOWN]
            told = ", ".join(f"{key:.200} = {self._content[key]!r:.200}" for key in shown)
            if len(self._left) > _SHOWN:
                told += f" and {len(self._left) - _SHOWN} more"
            raise FolderError(
                f"{self.where}: {told}: unknown here, so the model could be another than the one "
                "that was trained; remove what has no effect"
            )
