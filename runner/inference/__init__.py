"""Models that are there already, for commands that look at them: weights, texts, settings."""
