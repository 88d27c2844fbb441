"""Optimizers of whole matrices, and what they share."""
