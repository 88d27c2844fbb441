"""Families of mixture-of-experts models, each with its paper."""
