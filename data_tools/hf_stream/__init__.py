"""Batches streamed from Hugging Face data sets, without a copy on disk.

Each name is imported when it is first asked for: it needs JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_tools.hf_stream.source import HFStream
    from data_tools.hf_stream.steady import StreamFailure

__all__ = ["HFStream", "StreamFailure"]


def __getattr__(name: str) -> Any:
    if name == "HFStream":
        from data_tools.hf_stream.source import HFStream

        return HFStream
    if name == "StreamFailure":
        from data_tools.hf_stream.steady import StreamFailure

        return StreamFailure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
