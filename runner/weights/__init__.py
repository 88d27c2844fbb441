"""Weights that are there already: `reading` says how a name becomes a model on a mesh."""
