"""Inference with saved models: prompts, generation and answers."""
