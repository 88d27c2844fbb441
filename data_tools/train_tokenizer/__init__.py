"""Trains a byte-level BPE on text: `python -m data_tools.train_tokenizer`."""
