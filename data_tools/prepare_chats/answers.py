"""A chat as a text, and which of its characters the model learns to say."""

from collections.abc import Sequence
from datetime import datetime

from data_tools.prepare_chats.conversations import ASSISTANT, Conversation
from lmlib.data.chat import ChatTemplate, Rendered


def rendered(template: ChatTemplate, conversation: Conversation, now: datetime) -> Rendered:
    """The text of a chat with the assistant's turns in `Rendered.assistant`.

    They are those that the template marks. If it marks none, a turn is what follows the chat before
    it with the prompt for an answer, up to the end of the chat with it; spaces and newlines after a
    turn do not belong to it.

    Raises ValueError if the template cannot take the chat, or the chat up to a turn is not how the
    whole one begins.
    """
    tools = conversation.tools
    whole = template.render(conversation.messages, tools=tools, now=now)
    if whole.assistant:
        return whole
    turns = []
    for number, message in enumerate(conversation.messages):
        if message["role"] != ASSISTANT:
            continue
        if number == 0:
            raise ValueError("it begins with the assistant, and its template marks no turns")
        before, up_to = conversation.messages[:number], conversation.messages[: number + 1]
        prompt = template.render(before, add_generation_prompt=True, tools=tools, now=now).text
        answered = template.render(up_to, tools=tools, now=now).text.rstrip()
        for begun, what in ((prompt, "before"), (answered, "up to")):
            if not whole.text.startswith(begun):
                raise ValueError(
                    f"its template does not write the chat {what} message {number + 1} as the "
                    "whole chat begins, so that the answer cannot be found: give a --template that "
                    "marks answers by {% generation %}"
                )
        turns.append((len(prompt), len(answered)))
    return Rendered(whole.text, tuple(turns))


def without_shared(answers: Sequence[Rendered]) -> list[Rendered]:
    """The two answers of a pair without the assistant's turns that both have alike."""
    one, other = answers
    shared = {
        turn
        for turn in set(one.assistant) & set(other.assistant)
        if one.text[: turn[1]] == other.text[: turn[1]]
    }
    return [
        Rendered(each.text, tuple(turn for turn in each.assistant if turn not in shared))
        for each in answers
    ]
