"""Batches streamed from Hugging Face data sets, without a copy on disk, to try data sets out."""
