"""Turns an OSError of a file system into a TierError: whether a retry can help, and advice for the user. Pure."""

from __future__ import annotations

import errno

from resiliency.errors import TierError
from resiliency.regular_file import NotAFile

__all__ = ["tier_error"]

# Everything else (ENOSPC, EDQUOT, EIO, EAGAIN, ESTALE, ETIMEDOUT, EMFILE, ...) is retryable: space is
# freed, mounts recover.
_HOPELESS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENOENT,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ELOOP,
        errno.ENOTEMPTY,
        errno.EFBIG,
        errno.EXDEV,
    }
)

_ADVICE = {
    errno.ENOSPC: "free space there, keep fewer checkpoints or give the tier a larger volume",
    errno.EDQUOT: "the quota is used up: free space there or raise it",
    errno.EIO: "the device or mount fails: look at the kernel log of this host and consider replacing it",
    errno.ESTALE: "the network mount lost the folder: remount it",
    errno.EROFS: "the file system is mounted read-only: remount it or pass another folder",
    errno.EACCES: "give this user read and write permission there or pass another folder",
    errno.EPERM: "give this user read and write permission there or pass another folder",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away or pass another folder",
    errno.EISDIR: "a folder stands where a file belongs: move it away",
    errno.ENOENT: "the file or folder is gone: check the path and that the volume is mounted",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
}


def tier_error(error: OSError, *, where: str, action: str, key: str, path: str) -> TierError:
    """The error that a verb raises for ``error``; raise it ``from error``.

    Args:
        where: the tier, for the message.
        action: what was tried, as in "cannot <action> <key>".
        path: the file or folder, in case the error does not name it.
    """
    code = error.errno or 0
    advice = "move it away" if isinstance(error, NotAFile) else _ADVICE.get(code, "look at the kernel log of this host")
    return TierError(
        f"{where}: cannot {action} {key!r}: {error.strerror or error} ({errno.errorcode.get(code, code)},"
        f" path {error.filename or path}); {advice}",
        retryable=code not in _HOPELESS,
    )
