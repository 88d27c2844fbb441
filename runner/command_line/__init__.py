"""What the commands share: flags, errors as messages, exit codes."""
