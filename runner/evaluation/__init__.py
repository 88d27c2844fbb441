"""Evaluation of saved models: data sets, tasks, results and tables."""
