"""Training batches: the flat-token format, sources, shuffling and prefetching."""
