"""Settings of JAX and XLA that have to be made before JAX starts."""
