"""Optimizers, schedules, and the choice of weights that train with their rates."""
