"""The contenders of benchmarks/train_step.py: one training step, in lmlib and in other libraries."""
