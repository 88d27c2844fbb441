"""A chat as a text, and which of its characters the model learns to say."""

from collections.abc import Sequence

from data_tools.prepare_chats.conversations import ASSISTANT, Conversation
from lmlib.data.chats.chat import Chat, Rendered


def chat_of(conversation: Conversation) -> Chat:
    """What `texts_of` needs rendered."""
    roles = [message["role"] for message in conversation.messages]
    turns = [number for number, role in enumerate(roles) if role == ASSISTANT and number]
    return Chat(conversation.messages, conversation.tools, turns=turns)


def texts_of(chat: Chat, rendered: Rendered) -> list[Rendered]:
    """The text of a chat with the assistant's turns in `Rendered.assistant`.

    They are those that the template marks. If it marks none, a turn is what follows the chat before
    it with the prompt for an answer, up to the end of the chat with it; spaces and newlines after a
    turn do not belong to it. A template that writes a chat otherwise once it goes on (Qwen 3 leaves
    out what earlier answers had thought) makes a text for each turn, that of the chat up to it:
    what the model is shown when it answers.

    Raises ValueError if an answer does not follow its prompt.
    """
    if rendered.assistant:
        return [rendered]
    if chat.messages[0]["role"] == ASSISTANT:
        raise ValueError("it begins with the assistant, and its template marks no turns")
    alone = []
    for turn, (prompt, text) in zip(chat.turns, rendered.turns, strict=True):
        answered = text.rstrip()
        if not answered.startswith(prompt):
            raise ValueError(
                f"its template does not write message {turn + 1} after the prompt for it, so "
                "that the answer cannot be found: give a --template that marks answers by "
                "{% generation %}"
            )
        alone.append(Rendered(answered, ((len(prompt), len(answered)),)))
    if all(rendered.text.startswith(each.text) for each in alone):
        return [Rendered(rendered.text, tuple(turn for each in alone for turn in each.assistant))]
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
