"""Where the time of a step went: what a trace of JAX's profiler says of a compiled program."""
