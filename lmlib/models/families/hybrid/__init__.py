"""Families that mix recurrent layers with attention, each with its paper."""
