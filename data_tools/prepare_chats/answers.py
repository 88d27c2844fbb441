"""A chat as a text, and which of its characters the model learns to say."""

from collections.abc import Sequence
from datetime import datetime

from data_tools.prepare_chats.conversations import ASSISTANT, Conversation
from lmlib.data.chat import ChatTemplate, Rendered


def rendered(template: ChatTemplate, conversation: Conversation, now: datetime) -> list[Rendered]:
    """The text of a chat with the assistant's turns in `Rendered.assistant`.

    They are those that the template marks. If it marks none, a turn is what follows the chat before
    it with the prompt for an answer, up to the end of the chat with it; spaces and newlines after a
    turn do not belong to it. A template that writes a chat otherwise once it goes on (Qwen 3 leaves
    out what earlier answers had thought) makes a text for each turn, that of the chat up to it:
    what the model is shown when it answers.

    Raises ValueError if the template cannot take the chat, or an answer does not follow its prompt.
    """
    tools, messages = conversation.tools, conversation.messages
    whole = template.render(messages, tools=tools, now=now)
    if whole.assistant:
        return [whole]
    alone = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        if number == 0:
            raise ValueError("it begins with the assistant, and its template marks no turns")
        prompt = template.render(
            messages[:number], add_generation_prompt=True, tools=tools, now=now
        )
        answered = template.render(messages[: number + 1], tools=tools, now=now).text.rstrip()
        if not answered.startswith(prompt.text):
            raise ValueError(
                f"its template does not write message {number + 1} after the prompt for it, so "
                "that the answer cannot be found: give a --template that marks answers by "
                "{% generation %}"
            )
        alone.append(Rendered(answered, ((len(prompt.text), len(answered)),)))
    if all(whole.text.startswith(each.text) for each in alone):
        return [Rendered(whole.text, tuple(turn for each in alone for turn in each.assistant))]
    return alone


def answers_of(both: Sequence[list[Rendered]]) -> list[Rendered]:
    """The two answers of a pair, without the assistant's turns that both have alike.

    Raises ValueError if there are several texts of each, which differ before the last.
    """
    if any(one[:-1] != both[0][:-1] for one in both):
        raise ValueError(
            "its template writes earlier answers otherwise once a chat goes on, and the two of "
            "the pair differ in more than the last"
        )
    return without_shared([one[-1] for one in both])


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
