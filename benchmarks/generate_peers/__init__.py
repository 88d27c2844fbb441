"""Who continues prompts, and what a machine's memory allows."""
