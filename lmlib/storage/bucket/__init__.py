"""Folders in buckets: `gs://BUCKET/FOLDER` and `s3://BUCKET/FOLDER`.

Requests use TensorStore's key-value stores, which are a dependency anyway: one client, with one way
to find credentials, serves arrays and all other files.
"""
