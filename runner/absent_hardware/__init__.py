"""Plans for hardware that is not there: stand-ins, and reports kept for the next time."""
