"""Learns a byte-level BPE from text: `python -m data_tools.train_tokenizer`."""
