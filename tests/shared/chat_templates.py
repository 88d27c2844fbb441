"""Chat templates in the styles of well-known models, and chats.

chatml     the roles between two marks; the assistant's turns are marked for training
llama3     headers; a date in the system's message, which is always there
gemma      roles must alternate; no system message of its own, the assistant by another name
mistral    instructions in brackets; a namespace, a macro, loop controls, JSON with an indent
qwen3      earlier answers without their thoughts; the last one with them, even if they are empty
glm        no turn has an end: the marker of the next one ends it
phi3       a chat that waits for no answer has an end of its own
"""

from pathlib import Path

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_NAMES = ("chatml", "llama3", "gemma", "mistral", "qwen3", "glm", "phi3")
TEMPLATES = {
    name: (Path(__file__).parent / f"templates/{name}.jinja").read_text() for name in _NAMES
}
CHATS = {
    "a question": [{"role": "user", "content": "  What is 1 < 2 & 'é' in 日本?\n"}],
    "turns": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! 😀"},
        {"role": "user", "content": "And you?"},
        {"role": "assistant", "content": "Fine.\n\n"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"a": "<int>"}}}]
