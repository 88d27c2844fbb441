"""Weights in Hugging Face's format, in and out."""
