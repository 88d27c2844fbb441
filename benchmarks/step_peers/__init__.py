"""Contenders of benchmarks/train_step.py: one training step in several libraries."""
