"""Training runs that are disturbed, and then compared with one that was not.

experiment.py    the experiment: everything that could go wrong, at a small size
kinds.py         the kinds of runs that are made of it, and their inputs
job.py           a run through the real command line, started again and again
moments.py       when to disturb it
comparison.py    whether it left the same bits as another run
damage.py        damage to its files
striking.py      one run under one fault after the other
faults.py        what can happen to it, for the campaign in benchmarks/faults.py
"""
