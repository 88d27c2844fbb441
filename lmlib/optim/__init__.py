"""Optimizers, schedules, and which weights train at which rate."""
