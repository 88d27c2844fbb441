"""Settings of JAX and XLA that must be made before JAX starts."""
