"""Shows the content of a data set of flat tokens, its damage, and batches as a model sees them."""
