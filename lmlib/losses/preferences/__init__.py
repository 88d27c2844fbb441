"""Losses of preferences, one per file, and the code that they share; DPO is in lmlib.losses.dpo."""
