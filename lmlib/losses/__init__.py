"""What is minimised: a file for each objective, and what they share.

Losses are sums over tokens or pairs, so that any split of a batch adds up to the same.
"""
