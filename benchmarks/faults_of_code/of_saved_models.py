"""Faults of looking at models: folders of Hugging Face, generation, evaluation, plans."""

from faults_of_code.mutation import Mutation

MUTATIONS = (
    Mutation(
        "tensors that nobody knows are passed over",
        "lmlib/hf/names.py",
        "left = set(there) - {tensor.name for tensor in wanted}",
        "left: set[str] = set()",
        "tests/hf/test_names.py tests/hf/test_folders.py",
    ),
    Mutation(
        "keys of a config that nobody knows are passed over",
        "lmlib/hf/settings.py",
        "self._left = set(content) - set(without_effect)",
        "self._left: set[str] = set()",
        "tests/hf/test_folders.py",
    ),
    Mutation(
        "Phi-3's value follows its key in the wrong order",
        "lmlib/hf/families/phi.py",
        '"attention.key": ("kv_heads head_dim", "embed"),\n'
        '            "attention.value": ("kv_heads head_dim", "embed"),',
        '"attention.value": ("kv_heads head_dim", "embed"),\n'
        '            "attention.key": ("kv_heads head_dim", "embed"),',
        "tests/hf/test_golden.py",
    ),
    Mutation(
        "a repetition penalty rewards repetition",
        "lmlib/generate/sampling.py",
        "jnp.where(z_BV > 0, z_BV / penalty, z_BV * penalty)",
        "jnp.where(z_BV > 0, z_BV * penalty, z_BV / penalty)",
        "tests/generate/test_sampling.py",
    ),
    Mutation(
        "top-k keeps one token too many",
        "lmlib/generate/sampling.py",
        "return jnp.where(above_B1 >= limit, tried_B1, below_B1)",
        "return jnp.where(above_B1 > limit, tried_B1, below_B1)",
        "tests/generate/test_sampling.py",
    ),
    Mutation(
        "every token of a text is drawn with the same noise",
        "lmlib/generate/steps.py",
        "key = jax.random.fold_in(jax.random.wrap_key_data(seed_2), position)",
        "key = jax.random.fold_in(jax.random.wrap_key_data(seed_2), 0 * position)",
        "tests/generate/test_generator.py",
    ),
    Mutation(
        "tokens that are context are scored twice",
        "lmlib/evaluate/windows.py",
        "context = overlap if start else 0",
        "context = 0",
        "tests/evaluate/test_documents.py",
    ),
    Mutation(
        "a standard error of n, not n - 1",
        "lmlib/evaluate/ratio.py",
        "squares * n / (n - 1)",
        "squares",
        "tests/evaluate/test_documents.py",
    ),
    Mutation(
        "validation is a mean of means",
        "lmlib/evaluate/validation.py",
        "sum(each.tolist()) / self.count for",
        "float((each / self.counts).mean()) for",
        "tests/test_evaluate.py",
    ),
    Mutation(
        "a scan's matmuls are counted once",
        "lmlib/plan/flops.py",
        "times=place.times * (_turns(equation) if even is None else even)",
        "times=place.times",
        "tests/plan/test_flops.py",
    ),
    Mutation(
        "a tied head is no multiplication",
        "lmlib/models/decoder.py",
        "head = 6.0 * self.embedding.size",
        "head = 0.0 * self.embedding.size",
        "tests/plan/test_flops.py tests/models",
    ),
    Mutation(
        "an all-reduce sends as little as a reduce-scatter",
        "lmlib/plan/step_time.py",
        'return travelling + (2 if kind == "all-reduce" else 1) * self.latency',
        "return travelling + 0 * self.latency",
        "tests/plan/test_estimate.py",
    ),
    Mutation(
        "plan leaves the program out of what is needed",
        "lmlib/plan/memory.py",
        "return in_use + self.program",
        "return in_use",
        "tests/plan/test_out_of_memory.py",
    ),
    Mutation(
        "float32 products are taken for as fast as bfloat16's",
        "lmlib/profile/kernels.py",
        "peak *= FLOAT32_RATE[accelerator.platform]",
        "peak *= 1",
        "tests/profile/test_kernels.py",
    ),
    Mutation(
        "an H100's peak with sparsity",
        "lmlib/hardware/specifications.py",
        'device_kinds=("NVIDIA H100 80GB HBM3",),\n        flops={"bfloat16": 989e12',
        'device_kinds=("NVIDIA H100 80GB HBM3",),\n        flops={"bfloat16": 1_979e12',
        "tests/hardware/test_specifications.py",
    ),
)
