"""Layers that carry a state of constant size from token to token."""
