"""Fused kernels of attention, each for one kind of device."""
