"""Labelled answers, each followed by another row's answer to its prompt, for the loss KTO."""

import dataclasses

import numpy as np

from data_tools.prepare_chats.documents import Document


def labelled(document: Document, desirable: bool) -> Document:
    """Returns the document with its last answer as the target, and its label.

    The label is the first token's entry in the mask, which is never a target.
    """
    is_target = np.arange(len(document.ids)) >= _answer(document)
    is_target &= document.is_target
    is_target[0] = desirable
    return dataclasses.replace(document, is_target=is_target)


def after_its_prompt(answer: Document, other: Document) -> Document:
    """Returns the prompt of `answer` with the last answer of `other`, without a label."""
    prompt, begin = _answer(answer), _answer(other)
    ids = np.concatenate([answer.ids[:prompt], other.ids[begin:]])
    is_target = np.concatenate([np.zeros(prompt, bool), other.is_target[begin:]])
    return Document(ids, is_target, 0)


def _answer(document: Document) -> int:
    """The first token of the last answer, which is not the first of the document."""
    targets = 1 + np.flatnonzero(document.is_target[1:])
    return int(targets[np.flatnonzero(np.diff(targets, prepend=-1) > 1)[-1]])
