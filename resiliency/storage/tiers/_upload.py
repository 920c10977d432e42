"""Streams one object to a store through an fsspec file handle, so that only a failed part is sent again.

fsspec's buffered files keep the part that a failed flush could not send. Sending the same part again is safe with
resumable (GCS) and multipart (S3) uploads. The object becomes visible in :meth:`Upload.finish`, not before.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

from resiliency.storage.tiers._failures import SessionLost

__all__ = ["Upload"]

logger = logging.getLogger(__name__)


class Upload:
    """One upload. Thread: one at a time. Every method but :meth:`abort` may be called again after it raised, to
    continue.

    Args:
        handle: an ``fsspec.spec.AbstractBufferedFile`` opened "wb".

    Attributes:
        spoilt: True when the object became visible with other bytes than were sent; it must be deleted.
    """

    def __init__(self, handle: Any) -> None:
        self.spoilt = False
        self._handle = handle

    def add(self, block: bytes) -> None:
        """Buffers ``block``; :meth:`send` sends it when a part is full."""
        # Not write(), which would send as well: after a failure it would be unknown whether the block was buffered.
        self._handle.buffer.write(block)
        self._handle.loc += len(block)

    def send(self) -> None:
        """Sends the buffered bytes when they fill a part."""
        self._flush(force=False)

    def finish(self) -> None:
        """Sends the rest and makes the object visible."""
        self._flush(force=True)
        self._handle.close()

    def abort(self) -> None:
        """Ends the upload without an object. Never raises; a session that could not be cancelled expires in the
        store."""
        try:
            self._handle.discard()
        except Exception:  # Boundary: the error that led here is the one to report.
            logger.debug(
                "upload of %s could not be cancelled; the store drops it after a while",
                self._handle.path,
                exc_info=True,
            )
        finally:
            # An open handle would send its buffer and make the object visible when it is garbage collected.
            self._handle.closed = True

    def _flush(self, *, force: bool) -> None:
        handle = self._handle
        try:
            handle.flush(force=force)
        except Exception as error:
            # The frames of the failed call hold views of the buffer, which could then neither grow nor be freed.
            traceback.clear_frames(error.__traceback__)
            if force:
                handle.forced = False
            if handle.closed:
                # The session could not be opened: fsspec closes the handle, but its buffer is intact.
                handle.closed = False
                handle.offset = None
                raise
            # An AssertionError of gcsfs: the unfinished session did not report its progress. A ChecksumError: gcsfs
            # checked the digest after the object became visible.
            self.spoilt = type(error).__name__ == "ChecksumError"
            gone = isinstance(error, (FileNotFoundError, AssertionError)) or str(getattr(error, "code", "")) == "410"
            if gone or self.spoilt:
                raise SessionLost(f"{type(error).__name__}: {error}") from error
            raise
