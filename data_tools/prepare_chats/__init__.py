"""Converts conversations to a split of flat tokens with a loss mask."""
