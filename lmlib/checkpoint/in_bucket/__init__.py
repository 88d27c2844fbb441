"""Checkpoints in a bucket, where nothing is renamed and only one object changes in place.

A directory `gs://BUCKET/RUN/checkpoints` has these objects:

    checkpoints/steps.json                   the steps, and the folder of each
    checkpoints.files/<step>-<text>-<n>/…    the files of a step, named as on a disk

A step is there as soon as steps.json says so, and no longer. It is written with the condition that
nobody else has written it since (`lmlib.storage.bucket.owned`). No folder's name comes twice: the
text is another one whenever the directory is opened, and n counts saves. So a request of an earlier
process, however late it arrives, finds steps.json changed, or a folder that nobody reads.
"""
