"""Documents in, a split of flat tokens out."""

from data_tools.pretokenize.progress import Progress
from data_tools.pretokenize.shard import pretokenize_shard
from data_tools.pretokenize.split import pretokenize

__all__ = ["Progress", "pretokenize", "pretokenize_shard"]
