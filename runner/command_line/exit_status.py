"""Exit statuses of commands."""

FINISHED = 0
FAILED = 1  # this process, by an error of its own
MISTAKE = 2  # of the user's, or the processes did not find each other: nothing was trained
PEER_ENDED = 3  # another process ended or stopped answering
STOPPED = 75  # by a signal, its checkpoint whole: sysexits.h's "try again"; a scheduler may requeue
SIGNALLED = 128  # and the signal's number, as a shell has it
