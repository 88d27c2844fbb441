"""Why a tokenizer cannot be run by the fast engine."""


class UnsuitableError(ValueError):
    """The tokenizer is sound, but nothing proves that the fast engine would give its ids."""
