"""Sources of rows for every command that reads text.

One process reads blocks of rows, in order and cheaply; others extract the texts from them. This
package does not import lmlib, so that those others start fast.
"""
