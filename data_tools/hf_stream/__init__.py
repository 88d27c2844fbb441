"""Batches streamed from Hugging Face data sets, without a copy on disk."""

from data_tools.hf_stream.source import HFStream
from data_tools.hf_stream.steady import StreamFailure

__all__ = ["HFStream", "StreamFailure"]
