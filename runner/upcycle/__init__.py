"""Mixtures of experts of dense models that are there."""
