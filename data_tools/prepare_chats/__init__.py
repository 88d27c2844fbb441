"""Conversations in, a split of flat tokens with a loss mask out."""

from data_tools.prepare_chats.conversations import ConversationField
from data_tools.prepare_chats.prepare import prepare_chats
from data_tools.prepare_chats.template import load_template

__all__ = ["ConversationField", "load_template", "prepare_chats"]
