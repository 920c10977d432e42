"""Parses the addresses of tiers, and checks that their packages are installed without importing them."""

from __future__ import annotations

import importlib.util
import re
from urllib.parse import unquote, urlsplit

from resiliency.errors import ConfigError

__all__ = ["local_path", "store_path", "unknown_store"]

#: Object stores whose PUT is atomic, and the package fsspec needs for each.
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "memory": None}

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


def _scheme(address: str) -> str | None:
    """The lower-case scheme of ``address``, or None for a plain path."""
    match = _SCHEME.match(address)
    return match[1].lower() if match else None


def local_path(address: str) -> str | None:
    """The folder of a plain path or a ``file://`` address; None for every other scheme.

    Raises:
        ConfigError: empty, or a ``file://`` address of another host or without a path.
    """
    if not address:
        raise ConfigError("the address of a tier is empty; pass a folder or an address such as gs://bucket/job")
    kind = _scheme(address)
    if kind is None:
        return address
    if kind != "file":
        return None
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(
            f"{address!r} names no folder of this machine; pass file:///folder (three slashes) or a plain path"
        )
    return unquote(parts.path)


def unknown_store(address: str) -> str:
    """A sentence for the user when no known store has this address's scheme; "" for known stores and for folders."""
    if _scheme(address) in (None, "file", *_PACKAGES):
        return ""
    return _no_store(address)


def _no_store(address: str) -> str:
    return f"{address!r} is no object store this library knows ({', '.join(sorted(_PACKAGES))})"


def store_path(address: str) -> tuple[str, str]:
    """Scheme and path ("gs", "bucket/job") of an object store's address.

    Raises:
        ConfigError: unknown scheme, no bucket, or the package for it is not installed.
    """
    kind = _scheme(address)
    if kind not in _PACKAGES:
        raise ConfigError(f"{_no_store(address)}; mount other storage and pass its folder")
    for package in filter(None, ("fsspec", _PACKAGES[kind])):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{address!r} needs the package {package}; pip install {package}")
    path = address.split("://", 1)[1].rstrip("/")
    if not path or path.startswith("/") or "//" in path:
        raise ConfigError(f"{address!r} names no bucket, or has '//' in its path; pass {kind}://bucket/folder")
    return kind, f"/{path}" if kind == "memory" else path
