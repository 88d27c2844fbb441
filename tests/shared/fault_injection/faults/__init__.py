"""What can happen to a run. Each fault finds the run at rest and leaves it at rest.

fault.py      what a fault is, and what all of them look for
signals.py    kills, and polite signals
files.py      harm to checkpoints, and to what else is in the workdir
disks.py      disks that take nothing
outputs.py    output that nobody takes
updates.py    updates that break the numbers
data.py       data and weights that are not what they were
starts.py     starts that must be refused
deletions.py  files or the workdir, deleted, moved or exchanged under a run
readers.py    commands that read beside a run
campaign.py   all of them, and how often each is drawn
"""
