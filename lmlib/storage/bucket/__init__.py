"""Folders in buckets: `gs://BUCKET/FOLDER` and `s3://BUCKET/FOLDER`.

Requests go through TensorStore's key-value stores, which the library has anyway: one client, with
one way to find credentials, carries arrays and all other files.
"""
