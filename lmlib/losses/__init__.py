"""Objectives: a file for each, and the code that they share.

Losses are sums over tokens or pairs, so that any split of a batch adds up to the same.
"""
