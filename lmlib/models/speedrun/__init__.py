"""Parts of public speedruns that need more than a layer of their own, and the models made of them.

Sources: https://github.com/KellerJordan/modded-nanogpt and https://github.com/karpathy/nanochat.
"""
