"""URLs of folders in buckets, and their specification for TensorStore."""

import os
import re
from dataclasses import dataclass
from typing import Any

_DRIVERS = {"gs": "gcs", "s3": "s3"}
_URL = re.compile(r"(gs|s3):/{1,2}([^/]+)/*(.*)", re.DOTALL)  # `Path` makes one slash of two
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_LONGEST_NAME = 255  # bytes of a part, which is a folder's name in the copy on this machine
# S3's own names for what cannot be learned from a bucket of another maker's.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ANY_REGION = "us-east-1"


@dataclass(frozen=True)
class BucketUrl:
    """A folder in a bucket.

    Attributes:
      scheme: "gs" or "s3".
      folder: its parts joined by slashes; empty for the whole bucket.
    """

    scheme: str
    bucket: str
    folder: str

    @classmethod
    def parsed(cls, text: str) -> "BucketUrl | None":
        """The URL; `None` for a text that is not a bucket's URL.

        Raises ValueError for an illegal name of a bucket, or a folder with odd parts.
        """
        match = _URL.fullmatch(text)
        if match is None:
            return None
        scheme, bucket, folder = match[1], match[2], match[3].rstrip("/")
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(
                f"{text} names the bucket {bucket!r}, which no bucket can have as its name: names "
                "are 3 to 222 of a-z, 0-9, '.', '_' and '-'"
            )
        for part in folder.split("/") if folder else ():
            if part in ("", ".", "..") or re.search(r"[\x00-\x1f\\#?\[\]*]", part):
                raise ValueError(f"{text} has the part {part!r}, with which it is no folder's name")
            if len(part.encode()) > _LONGEST_NAME:
                raise ValueError(f"{text} has a part of more than {_LONGEST_NAME} bytes")
        return cls(scheme, bucket, folder)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.folder}" if self.folder else "")

    def below(self, name: str) -> "BucketUrl":
        """The URL of a folder in this one."""
        return BucketUrl(self.scheme, self.bucket, self.key(name))

    def key(self, name: str) -> str:
        """The object that a file of the folder is."""
        return f"{self.folder}/{name}" if self.folder else name

    def key_value_store(self, folder: str = "") -> dict[str, Any]:
        """TensorStore's specification of the keys below `folder` of the bucket.

        For `s3://`, the endpoint, the region and the credentials are where Amazon's own tools look
        for them. For `gs://`, the credentials are where Google's tools look.
        """
        spec: dict[str, Any] = {
            "driver": _DRIVERS[self.scheme],
            "bucket": self.bucket,
            "path": folder,
        }
        if self.scheme == "gs":
            return spec
        endpoint, region = _first(_ENDPOINTS), _first(_REGIONS)
        if endpoint is not None:
            spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or _ANY_REGION}
        if "AWS_ACCESS_KEY_ID" in os.environ:  # else files and the machine's own role are tried too
            spec["aws_credentials"] = {"type": "environment"}
        # Always, not only where TensorStore knows the server: conditional writes depend on it.
        return spec | {"use_conditional_write": True}


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
