"""Reads and writes adapters in PEFT's format (https://github.com/huggingface/peft)."""
