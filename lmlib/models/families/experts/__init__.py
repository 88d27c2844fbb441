"""Families with mixtures of experts, each with its paper."""
