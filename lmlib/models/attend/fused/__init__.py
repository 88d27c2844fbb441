"""Fused attention kernels, each for one kind of device."""
