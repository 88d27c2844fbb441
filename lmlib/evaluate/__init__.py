"""Measures models: the loss of batches, and of each token, document and place in a document."""
