"""Classifies errors of fsspec file systems. Pure: it recognises errors of client libraries by names and attributes, and
imports none of them."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass

__all__ = ["Failure", "SessionLost", "explain"]

_BUSY = frozenset({408, 425, 429, *range(500, 600)})

_ADVICE = {
    401: (
        "the credentials were refused: log in again (gcloud auth application-default login)"
        " or fix the pod's service account"
    ),
    403: "the identity lacks permission: grant it storage.objects create, get, list and delete on the bucket",
    404: "the bucket does not exist or is hidden from this identity: create it or fix the address",
    412: "somebody else wrote that object with other content: give each run its own name or folder",
    416: "the object is shorter than its record says: verify the step",
    429: "the store limits the rate: save less often or spread the objects over more prefixes",
}

#: Temporary errors, by class name, so that nothing has to be imported to recognise them.
_PASSING = frozenset(
    {
        "ChecksumError",
        "ChunkedEncodingError",
        "ClientConnectionError",
        "ClientConnectorError",
        "ClientOSError",
        "ClientPayloadError",
        "ConnectTimeout",
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "ContentDecodingError",
        "EndpointConnectionError",
        "ProxyError",
        "ReadTimeout",
        "ReadTimeoutError",
        "RefreshError",
        "ResponseParserError",
        "SSLError",
        "ServerDisconnectedError",
        "ServiceUnavailable",
        "Timeout",
        "TooManyRequests",
        "TransportError",
    }
)

#: Mistakes of the caller, of the options or of the installation: the same call will fail again.
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, ImportError, NotImplementedError)


class SessionLost(Exception):
    """The store lost or damaged a streamed upload. Sending a part again does not help; putting the whole file again
    does."""


@dataclass(frozen=True)
class Failure:
    """A classified error.

    Attributes:
        status: HTTP status, or the equivalent one; None when there was no answer.
        what: the error in words.
        retryable: the same call may succeed later.
        advice: what to do next.
    """

    status: int | None
    what: str
    retryable: bool
    advice: str


def explain(error: BaseException) -> Failure:
    """Explains an error by its HTTP status, otherwise by its class."""
    if isinstance(error, SessionLost):
        return Failure(None, f"upload lost: {error}", True, "put the file again from its start")
    status = _status(error)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if status is not None:
        busy = status in _BUSY
        advice = _ADVICE.get(
            status, "the store is overloaded or down: check its status page" if busy else "see the message"
        )
        return Failure(status, what, busy, advice)
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return Failure(None, what, True, "the store did not answer in time: check the network of this host")
    if _named(error, "DefaultCredentialsError"):
        return Failure(401, what, False, _ADVICE[401])
    if isinstance(error, ConnectionError) or any(_named(error, name) for name in _PASSING):
        return Failure(None, what, True, "check the network of this host and the store's status page")
    if isinstance(error, _MISTAKES):
        return Failure(None, what, False, "check the address and the storage options")
    return Failure(None, what, True, "see the message; check the network of this host")


def _named(error: BaseException, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    # gcsfs turns these three into plain OSErrors; only the class or the text tells them apart.
    if isinstance(error, FileNotFoundError):
        return 404
    if isinstance(error, FileExistsError):
        return 412
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and str(error).startswith("Forbidden")):
        return 403
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        return 403
    for link in (error, error.__cause__):
        # gcsfs: code (a number or its text); aiohttp: status; botocore: inside the response.
        response = getattr(link, "response", None)
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        for value in (getattr(link, "code", None), getattr(link, "status", None), metadata.get("HTTPStatusCode")):
            if isinstance(value, (int, str)) and str(value).isdigit() and 400 <= int(value) < 600:
                return int(value)
    return None
