"""What two processes say to each other arrives as it was said, or not at all."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlib.data.chats.protocol import message_of, read_message

TEXTS = st.text(st.sampled_from("a\x00é😀\ud83d\ude00"))  # lone surrogates too
VALUES = st.none() | st.dictionaries(st.text(), st.lists(st.integers()))


@pytest.mark.landing
@given(st.lists(st.tuples(VALUES, TEXTS)), st.data())
def test_messages_arrive_whole_and_in_order(said: list, data: st.DataObject) -> None:
    messages = [message_of(*each) for each in said]
    sent = b"".join(messages)
    whole = data.draw(st.integers(0, len(sent)))
    stream = io.BytesIO(sent[:whole])
    arrived = []
    with pytest.raises(EOFError):
        while True:
            arrived.append(read_message(stream.read))
    ends = [sum(map(len, messages[: n + 1])) for n in range(len(messages))]
    assert arrived == said[: sum(end <= whole for end in ends)]


def test_of_a_message_that_is_too_long_nothing_is_read() -> None:
    stream = io.BytesIO(b"\x7f" * 16)
    with pytest.raises(ValueError, match=r"a message has .* bytes, more than 1,000"):
        read_message(stream.read, 1_000)
