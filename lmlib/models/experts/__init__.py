"""Mixtures of experts: of many MLPs each token goes through a few, which a router chooses.

router.py       which experts each token goes to, with which shares
mixture.py      the feed-forward layer: router, experts, shared experts
mlps.py         what the experts compute of rows that are sorted by expert
grouped.py      products of such rows, each group by its own matrix
rounds.py       rows to experts and back, as often as the buffer asks, and the backward pass
gathered.py     one way for the rows: every device gathers the tokens of all
exchanged.py    another: each row is sent to its expert's device
"""
