"""Training runs: initial state, steps, checkpoints and results."""
