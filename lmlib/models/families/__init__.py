"""Families of models: functions of the architecture alone, each with its paper."""
