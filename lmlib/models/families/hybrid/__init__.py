"""Families with recurrent layers and attention in turn."""
