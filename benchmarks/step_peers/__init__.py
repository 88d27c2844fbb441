"""The contenders of benchmarks/train_step.py: one training step, written by lmlib and by others."""
