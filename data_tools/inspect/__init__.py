"""Shows what a data set of flat tokens holds, checks that it is whole, and what a model sees."""
