"""What `tokenizers` raises, as errors that a caller can expect."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def tokenizers_errors(what: str) -> Iterator[None]:
    """Turns whatever `tokenizers` raises into ValueError: `what`, and its cause in one line."""
    try:
        yield
    except BaseException as error:  # `tokenizers` raises bare Exception
        # A panic of Rust is no Exception, and has no public class to catch.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {' '.join(str(error).split())}") from error
