"""Time of a compiled step by scope and kernel, from a trace of JAX's profiler."""
