"""Model families, each with its paper; they define the architecture only."""
