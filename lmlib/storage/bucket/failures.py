"""Server errors of buckets as messages without secrets.

TensorStore's errors quote requests and answers that contain keys, tokens and signatures. Their text
is therefore never passed on; it is only searched for known words.
"""

import errno
import re

_CREDENTIALS = "give others, or renew them (docs/buckets.md says where they are looked for)"
_INVALID = r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AuthorizationHeaderMalformed"
# Words in an answer, the errno and the cause; the first match is used.
_FINAL = {
    r"OUT_OF_RANGE": (errno.ERANGE, "it has fewer bytes"),
    r"NoSuchBucket|NOT_FOUND": (
        errno.ENOENT,
        "the bucket does not exist: create it, or use another",
    ),
    r"ExpiredToken|TokenRefreshRequired|RequestExpired": (
        errno.EACCES,
        f"the credentials have expired: {_CREDENTIALS}",
    ),
    _INVALID: (errno.EACCES, f"the credentials are not valid there: {_CREDENTIALS}"),
    r"UNAUTHENTICATED|[Cc]redentials|http_response_code='401'": (
        errno.EACCES,
        f"there are no valid credentials: {_CREDENTIALS}",
    ),
    r"PERMISSION_DENIED|AccessDenied|http_response_code='403'": (
        errno.EACCES,
        "permission is denied: these credentials do not allow it",
    ),
}
_PASSING = {
    r"http_response_code='429'|SlowDown|RESOURCE_EXHAUSTED": "the server asks for fewer requests",
    r"http_response_code='5\d\d'|INTERNAL": "the server fails",
    r"UNAVAILABLE|DEADLINE_EXCEEDED|UNKNOWN|ABORTED|CURL|curl": "the server cannot be reached",
}
_REFUSED = "the server refuses the request"


class BucketError(OSError):
    """A failed request: `cannot read gs://bucket/file: permission is denied …`."""


def lasting(text: str) -> tuple[int, str] | None:
    """Returns the errno and the cause of a TensorStore error if retrying is useless."""
    final = (known for pattern, known in _FINAL.items() if re.search(pattern, text))
    return next(final, None if passing(text) != _REFUSED else (errno.EIO, _REFUSED))


def unreachable(text: str) -> tuple[int, str] | None:
    """Returns the errno and the cause of an error of the request itself, not of its result."""
    if (cause := passing(text)) != _REFUSED:
        return errno.EIO, f"{cause}: try again later"
    known = lasting(text)
    return known if known is not None and known[0] == errno.EACCES else None


def passing(text: str) -> str:
    """Returns the cause of an error that a retry may resolve."""
    return next(
        (cause for pattern, cause in _PASSING.items() if re.search(pattern, text)), _REFUSED
    )
