"""Families that mix recurrent layers with attention."""
