"""What this process and that of the chat templates say to each other: JSON and texts over pipes.

A question is an object of
  sources: templates by name,
  variables: what they know besides a chat, by name,
  now: what they take for the time, in ISO 8601,
  chats: how many messages follow,
each of them an object of `template`, a name; `messages`; `tools`; `add_generation_prompt`; and
`turns`, numbers of messages.

The answers to it are a series for the compilation, then one for each chat, and `END` after each.
That for the compilation is empty. That for a chat is its text with what is marked as the
`assistant`'s; if nothing is, the text before each turn with the prompt for it, and that with the
turn, or the `length` of one that the chat's begins with. `refused`, with a reason, ends a series
early, and after a compilation everything.
"""

import json
from collections.abc import Callable
from typing import Any

LARGEST_TEXT = 16 << 20  # characters that a template may write
LARGEST_ANSWER = 5 * LARGEST_TEXT  # bytes: of a character up to four, and of what is marked
END = (None, "")  # of a series
OUT_OF_MEMORY = 77  # exit status of the process
_LENGTH = 8  # bytes for the length of each part of a message


def message_of(value: Any, text: str = "") -> bytes:
    """The message of both; raises TypeError, ValueError or RecursionError if `value` is no JSON.

    A text may have lone surrogates.
    """
    parts = json.dumps(value).encode(), text.encode("utf-8", "surrogatepass")
    return b"".join([*(len(part).to_bytes(_LENGTH) for part in parts), *parts])


def read_message(read: Callable[[int], bytes], largest: int | None = None) -> tuple[Any, str]:
    """What the next message says; `read` gives so many bytes, or fewer at the end.

    Raises:
      EOFError: if there is none, or only a part of one.
      ValueError: if it has more than `largest` bytes.
    """
    sizes = [int.from_bytes(_exactly(read, _LENGTH)) for _ in range(2)]
    if largest is not None and sum(sizes) > largest:
        raise ValueError(f"a message has {sum(sizes):,} bytes, more than {largest:,}")
    value, text = (_exactly(read, size) for size in sizes)
    return json.loads(value), text.decode("utf-8", "surrogatepass")


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    content = read(size)
    if len(content) < size:
        raise EOFError
    return content
