"""A chat as a text, and which of its characters the model learns to say."""

import functools
import re
from collections.abc import Collection, Sequence

from data_tools.prepare_chats.conversations import ASSISTANT, USER, Conversation
from lmlib.data.chats.chat import Chat, ChatTemplate, Message, Rendered, after_answer


def chat_of(conversation: Conversation) -> Chat:
    """What `texts_of` needs rendered."""
    roles = [message["role"] for message in conversation.messages]
    turns = [number for number, role in enumerate(roles) if role == ASSISTANT and number]
    return Chat(conversation.messages, conversation.tools, turns=turns)


class NextTurns:
    """Finds what ends the answers of a template that writes no special token after them: the marker
    of the next turn, as `<|user|>` of GLM."""

    def __init__(self, template: ChatTemplate, special: Collection[str]) -> None:
        """`special`: names of the tokenizer's special tokens."""
        self._template, self._special = template, sorted(special, key=len, reverse=True)
        self._marker = functools.cache(self._find)

    def after(self, messages: Sequence[Message], turn: int) -> str:
        """The text between message number `turn` and the end of that marker.

        It is empty if the answer has an end of its own or the template marks no next turn. At the
        end of a chat the user goes on, or a tool if the answer calls one.
        """
        if turn + 1 < len(messages):
            return self._marker(messages[turn + 1]["role"])
        return self._marker("tool" if messages[turn].get("tool_calls") else USER)

    def _find(self, role: str) -> str:
        after, more = after_answer(self._template, role)
        if not self._special or any(name in after for name in self._special):
            return ""
        found = re.match(rf"\s*(?:{'|'.join(map(re.escape, self._special))})", more)
        return found[0] if found else ""


def texts_of(chat: Chat, rendered: Rendered, next_turns: NextTurns) -> list[Rendered]:
    """The text of a chat with the assistant's turns in `Rendered.assistant`.

    They are those that the template marks. If it marks none, a turn is what follows the chat before
    it with the prompt for an answer, up to the end of the chat with it; spaces and newlines after a
    turn do not belong to it. If the template ends no turn, the marker of the next one does, which
    is then added to the end of a text. A template that writes a chat otherwise once it goes on
    (Qwen 3 leaves out what earlier answers had thought) makes a text for each turn, that of the
    chat up to it: what the model is shown when it answers.

    Raises ValueError if an answer does not follow its prompt.
    """
    if rendered.assistant:
        return [rendered]
    if chat.messages[0]["role"] == ASSISTANT:
        raise ValueError("it begins with the assistant, and its template marks no turns")
    alone = []
    for turn, (prompt, text) in zip(chat.turns, rendered.turns, strict=True):
        marker = next_turns.after(chat.messages, turn)
        answered = text + marker if marker else text.rstrip()
        if not answered.startswith(prompt):
            raise ValueError(
                f"its template does not write message {turn + 1} after the prompt for it, so "
                "that the answer cannot be found: give a --template that marks answers by "
                "{% generation %}"
            )
        alone.append(Rendered(answered, ((len(prompt), len(answered)),)))
    whole = rendered.text
    if chat.turns and chat.turns[-1] + 1 == len(chat.messages):
        whole += next_turns.after(chat.messages, chat.turns[-1])
    if all(whole.startswith(each.text) for each in alone):
        return [Rendered(whole, tuple(turn for each in alone for turn in each.assistant))]
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
