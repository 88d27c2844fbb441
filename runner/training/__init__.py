"""A training run: its beginning, its steps, its checkpoints and its results."""
