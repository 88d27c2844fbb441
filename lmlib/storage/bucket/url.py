"""URLs of folders in buckets, and their specification for TensorStore."""

import os
import re
from dataclasses import dataclass
from typing import Any

_URL = re.compile(r"(gs|s3):/{1,2}([^/]+)/*(.*)", re.DOTALL)  # `Path` merges the two slashes
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_LONGEST_NAME = 255  # bytes of a part, which is a folder name in the local copy
# Amazon's variables for settings that another vendor's bucket doesn't report.
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
        """Parses a URL; `None` for text that is not a bucket's URL.

        Raises ValueError for an illegal bucket name, or a folder with illegal parts.
        """
        match = _URL.fullmatch(text)
        if match is None:
            return None
        scheme, bucket, folder = match[1], match[2], match[3].rstrip("/")
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(
                f"{text} has the bucket name {bucket!r}, which no bucket can have: use 3 to 222 of "
                "a-z, 0-9, '.', '_' and '-'"
            )
        for part in folder.split("/") if folder else ():
            if part in ("", ".", "..") or re.search(r"[\x00-\x1f\\#?\[\]*]", part):
                raise ValueError(f"{text} has the part {part!r}, which no folder may have")
            if len(part.encode()) > _LONGEST_NAME:
                raise ValueError(f"{text} has a part of more than {_LONGEST_NAME} bytes")
        return cls(scheme, bucket, folder)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.folder}" if self.folder else "")

    def below(self, name: str) -> "BucketUrl":
        """Returns the URL of a subfolder."""
        return BucketUrl(self.scheme, self.bucket, self.key(name))

    def key(self, name: str) -> str:
        """Returns the object key of a file in the folder."""
        return f"{self.folder}/{name}" if self.folder else name

    def key_value_store(self, folder: str = "") -> dict[str, Any]:
        """Returns TensorStore's specification of the keys below `folder` of the bucket.

        For `s3://`, the endpoint, the region and the credentials come from the places that Amazon's
        own tools use. For `gs://`, the credentials come from the places that Google's tools use.
        """
        spec: dict[str, Any] = {"bucket": self.bucket, "path": folder}
        if self.scheme == "gs":
            return spec | {"driver": "gcs"}
        endpoint, region = _first(_ENDPOINTS), _first(_REGIONS)
        if endpoint is not None:
            spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or _ANY_REGION}
        if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise also try files and the machine's role
            spec["aws_credentials"] = {"type": "environment"}
        # Always, not only for servers that TensorStore knows: conditional writes depend on it.
        return spec | {"driver": "s3", "use_conditional_write": True}


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
