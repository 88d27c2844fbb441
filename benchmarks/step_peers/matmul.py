"""How fast XLA multiplies matrices in this process: what a step on a CPU is measured against."""

import time

import jax
import jax.numpy as jnp

_SIDE, _TIMES = 2_048, 4


class Matmul:
    """Products of two square matrices in the step's precision, on all cores.

    Attributes:
      flops_per_cpu_second: of each turn but the first, which warms up.
    """

    def __init__(self, precision: str):
        ones = jnp.ones((_SIDE, _SIDE), precision)
        product = jax.jit(jnp.matmul).lower(ones, ones).compile()
        self.flops_per_cpu_second: list[float] = []
        self._run = lambda: product(ones, ones)
        self._warm = False

    def turn(self) -> None:
        began = time.process_time()
        for _ in range(_TIMES):
            last = self._run()
        jax.block_until_ready(last)
        flops = _TIMES * 2 * _SIDE**3
        if self._warm:
            self.flops_per_cpu_second.append(flops / (time.process_time() - began))
        self._warm = True
