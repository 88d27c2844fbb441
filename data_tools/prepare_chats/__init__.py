"""Conversations in, a split of flat tokens with a loss mask out."""
