"""Where documents come from: sources of rows, for every command that reads text.

One process reads blocks of rows, in order and at little cost; others take the texts out of them.
Nothing here imports lmlib, so that those others start fast.
"""
