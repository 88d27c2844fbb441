"""Mixtures of experts: a router sends each token to a few of many MLPs.

router.py       chooses each token's experts and their shares (routing weights)
mixture.py      the feed-forward layer: router, experts, shared experts
mlps.py         the experts' MLPs, on rows that are sorted by expert
grouped.py      matrix products of sorted rows, one matrix for each group
rounds.py       moves rows to experts and back, in several rounds if needed, and the backward pass
dispatches.py   by all-gather, where every device gathers all tokens, or by all-to-all of rows
"""
