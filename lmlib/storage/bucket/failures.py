"""Server errors of buckets as messages without secrets.

TensorStore's errors quote requests and answers that contain keys, tokens and signatures. Their text
is therefore never passed on; it is only searched for known words.
"""

import errno
import re

_CREDENTIALS = "give others, or renew them (docs/buckets.md says where they are looked for)"
# Words in an answer, and their meaning; the first match is used.
_FINAL = (
    (r"OUT_OF_RANGE", errno.ERANGE, "it has fewer bytes"),
    (r"NoSuchBucket|NOT_FOUND", errno.ENOENT, "no bucket is called so: make it, or name another"),
    (
        r"ExpiredToken|TokenRefreshRequired|RequestExpired",
        errno.EACCES,
        f"the credentials have expired: {_CREDENTIALS}",
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AuthorizationHeaderMalformed",
        errno.EACCES,
        f"the credentials are not valid there: {_CREDENTIALS}",
    ),
    (
        r"UNAUTHENTICATED|[Cc]redentials|http_response_code='401'",
        errno.EACCES,
        f"there are no valid credentials: {_CREDENTIALS}",
    ),
    (
        r"PERMISSION_DENIED|AccessDenied|http_response_code='403'",
        errno.EACCES,
        "permission is denied: these credentials may not do that there",
    ),
)
_PASSING = (
    (r"http_response_code='429'|SlowDown|RESOURCE_EXHAUSTED", "the server asks for fewer requests"),
    (r"http_response_code='5\d\d'|INTERNAL", "the server fails"),
    (r"UNAVAILABLE|DEADLINE_EXCEEDED|UNKNOWN|ABORTED|CURL|curl", "the server cannot be reached"),
)


class BucketError(OSError):
    """A failed request: `cannot read gs://bucket/file: permission is denied …`."""


def lasting(text: str) -> tuple[int, str] | None:
    """Returns the errno and the cause of a TensorStore error if retrying is useless."""
    for pattern, code, cause in _FINAL:
        if re.search(pattern, text):
            return code, cause
    return None if any(re.search(pattern, text) for pattern, _ in _PASSING) else _UNKNOWN


def unreachable(text: str) -> tuple[int, str] | None:
    """Returns the errno and the cause of an error of the request itself, not of its result."""
    for pattern, cause in _PASSING:
        if re.search(pattern, text):
            return errno.EIO, f"{cause}: try again later"
    known = [(code, cause) for pattern, code, cause in _FINAL if re.search(pattern, text)]
    return next((each for each in known if each[0] == errno.EACCES), None)


def passing(text: str) -> str:
    """Returns the cause of an error that a retry may resolve."""
    return next((cause for pattern, cause in _PASSING if re.search(pattern, text)), _UNKNOWN[1])


_UNKNOWN = errno.EIO, "the server refuses the request"
