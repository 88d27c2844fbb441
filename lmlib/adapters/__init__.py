"""Small trainable weights added to a model's weights."""
