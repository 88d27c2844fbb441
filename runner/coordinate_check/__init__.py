"""Whether models of several sizes change alike in their first steps."""
