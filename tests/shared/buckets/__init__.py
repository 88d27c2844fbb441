"""Buckets on this machine: emulators of S3 and of Google's, behind a proxy that makes faults."""
