"""Runs of several processes, and how processes stop and end."""
