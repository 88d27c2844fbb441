"""Exit statuses of commands."""

FINISHED = 0
FAILED = 1  # an error in this process
MISTAKE = 2  # a user error, or the processes did not find each other; nothing was trained
PEER_ENDED = 3  # another process ended or stopped responding
STOPPED = 75  # stopped by a signal after a checkpoint: EX_TEMPFAIL, so a scheduler may requeue it
SIGNALLED = 128  # plus the signal's number, as in a shell
