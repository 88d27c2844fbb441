"""Families with mixtures of experts.

mixtures.py      what their folders share: tensors of experts, keys of routers
mixtral.py, qwen3_moe.py, olmoe.py, deepseek.py, gpt_oss.py
"""
