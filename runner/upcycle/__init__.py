"""Mixtures of experts from dense models."""
