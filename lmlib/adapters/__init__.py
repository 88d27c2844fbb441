"""Small weights that train beside those of a model."""
