"""Measures a model's loss on batches, and by token, document and position in a document."""
