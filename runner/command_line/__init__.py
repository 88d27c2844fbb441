"""Shared code of the commands: flags, error messages and exit codes."""
