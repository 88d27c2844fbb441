"""Shows a data set of flat tokens, its damage, and batches as seen by a model."""
