"""Saved weights: `models` finds a saved model by reference and reads it onto a mesh."""
