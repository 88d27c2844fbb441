"""Checkpoints in a bucket, where nothing is renamed and nothing changes in place.

Of a directory `gs://BUCKET/RUN/checkpoints`, each step has

    checkpoints/<step>/arrays            the name of the folder of its arrays, written first
    checkpoints/<step>/notes/notes.json
    checkpoints/<step>/manifest.json     as on a disk, written last: with it the step is whole
    checkpoints.arrays/<step>-<text>/state/<leaf>/…

The text is another one whenever the directory is opened, so no process writes into what another
has begun. A step is removed manifest first. Arrays lie apart, since they are many, and what lists
the steps should not list them.
"""
