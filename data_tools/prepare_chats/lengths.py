"""What becomes of a conversation that is longer than wanted."""

from typing import Literal

import numpy as np

# drop: it is left out. cut_prompt: its beginning is, up to the first response at most. cut_turns:
# its end is, after the last response that is left whole. A response is never cut: a conversation in
# which that cannot be done is dropped.
TooLong = Literal["drop", "cut_prompt", "cut_turns"]


def shortened(
    ids: np.ndarray, is_target: np.ndarray, longest: int, too_long: TooLong
) -> slice | None:
    """Which of the ids of a conversation with more than `longest` are kept; None: it is dropped."""
    targets = np.flatnonzero(is_target)
    if too_long == "cut_prompt":
        begin = len(ids) - longest
        # A token before the first target must stay: nothing else predicts it.
        return slice(begin, len(ids)) if begin < targets[0] else None
    if too_long == "cut_turns":
        ends = 1 + targets[np.flatnonzero(np.diff(targets, append=len(ids) + 1) > 1)]
        kept = ends[ends <= longest]
        return slice(0, int(kept[-1])) if len(kept) else None
    return None
