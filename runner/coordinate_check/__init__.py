"""Checks that models of several sizes change alike in their first steps."""
