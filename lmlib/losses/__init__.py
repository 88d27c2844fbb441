"""Objectives, one per file, and the code that they share.

Losses are sums over tokens or pairs, so the result does not depend on how a batch is split.
"""
