"""A small fault of the code, and the tests that find it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault in a file.

    Args:
      what: then happens.
      file: from the root of the checkout.
      before: stands once in the file.
      after: takes its place.
      tests: files of tests, of which a default one finds it.
    """

    what: str
    file: str
    before: str
    after: str
    tests: str
