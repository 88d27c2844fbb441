"""Which layers have a window, as a config.json lists them."""

from lmlib.hf.folder import FolderError
from lmlib.hf.settings import Settings

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(settings: Settings, layers: int) -> list[str] | None:
    """`FULL` or `SLIDING` of each layer; `None` where config.json does not say.

    Raises:
      FolderError: if it says something else.
    """
    kinds: list[str] | None = settings.take("layer_types", None, list)
    if kinds is None or (len(kinds) == layers and all(kind in (FULL, SLIDING) for kind in kinds)):
        return kinds
    raise FolderError(
        f"{settings.where}: layer_types = {kinds!r:.200} is not supported, only {FULL!r} or "
        f"{SLIDING!r} for each of {layers} layers"
    )
