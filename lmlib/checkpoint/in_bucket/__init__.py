"""Checkpoints in a bucket, where nothing is renamed and only one object changes in place.

A directory `gs://BUCKET/RUN/checkpoints` has these objects:

    checkpoints/steps.json                   the steps, and the folder of each
    checkpoints.files/<step>-<text>-<n>/…    the files of a step, named as on a disk

A step exists exactly while steps.json lists it. steps.json is written on condition that no other
process has written it since (`lmlib.storage.bucket.owned`). No folder name is reused: the text is
new whenever the directory is opened, and n counts saves. A late request from an earlier process
therefore finds steps.json changed, or writes to a folder that is never read.
"""
