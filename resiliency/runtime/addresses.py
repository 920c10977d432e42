"""Names of hosts and workloads, and addresses of supervisors.

Of several supervisors with one state file, one leads and the others stand by.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from resiliency.errors import ConfigError

__all__ = ["NAME", "STANDS_BY", "STANDS_BY_STATUS", "supervisor_urls"]

#: Name of a host or a workload. It is used in addresses, variables, file names and logs.
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
#: The text and the HTTP status that a supervisor answers with while another one leads.
STANDS_BY, STANDS_BY_STATUS = "this supervisor stands by; another one leads", 503


def supervisor_urls(words: Iterable[str]) -> tuple[str, ...]:
    """Returns the addresses in ``words``, without duplicates. A word is one address, or several separated by commas.

    Raises:
        ConfigError: there is no address, or one is not of the form ``https://HOST:PORT``.
    """
    given = [url.strip().rstrip("/") for word in words for url in word.split(",")]
    found = tuple(dict.fromkeys(url for url in given if url))
    if not found:
        raise ConfigError(
            "no address of a supervisor: pass --supervisor https://HOST:PORT, or set RESILIENCY_SUPERVISOR"
        )
    for url in found:
        _check(url)
    return found


def _check(url: str) -> None:
    parts = urlsplit(url)
    try:
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        fits = False
    if not fits:
        raise ConfigError(f"--supervisor {url}: pass https://HOST:PORT")
