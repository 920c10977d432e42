"""Asks a supervisor by HTTP, for the command line. The standard library only."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from resiliency.errors import AgentError, ConfigError

__all__ = ["OperatorClient"]

_TIMEOUT_S = 10.0
_MOST_BYTES = 64 << 20


class OperatorClient:
    """Thread: any. Blocks: 10 s at most for each request.

    Args:
        url: ``http://host:port``, or ``https``.
        token: the operators'; "": none.
        ca: file with the certificates to trust; "": the system's.
        cert, key: of this client, for a supervisor that asks for one.

    Raises:
        ConfigError: the address or a file is wrong.
    """

    def __init__(self, url: str, *, token: str = "", ca: str = "", cert: str = "", key: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"address {url!r}: pass http://HOST:PORT or https://HOST:PORT")
        self._url, self._token = url.rstrip("/"), token
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=ca or None)
                if cert:
                    context.load_cert_chain(cert, key or None)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{ca} {cert} {key}: {error}") from error
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, **query: object) -> dict[str, Any]:
        """
        Raises:
            AgentError: it cannot be reached, or refuses; the error says what to do.
        """
        return self._ask("GET", path, query)

    def post(self, path: str, **query: object) -> dict[str, Any]:
        """Raises: as :meth:`get`."""
        return self._ask("POST", path, query)

    def _ask(self, method: str, path: str, query: dict[str, object]) -> dict[str, Any]:
        given = {key: value for key, value in query.items() if value not in ("", None)}
        address = f"{self._url}{urllib.parse.quote(path)}" + (f"?{urllib.parse.urlencode(given)}" if given else "")
        request = urllib.request.Request(address, method=method)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                found = json.loads(response.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            raise AgentError(f"{self._url}: {_reason(error)}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "reason", error)
            raise AgentError(
                f"no supervisor answers at {self._url}: {why}. Training goes on without it; see whether its process"
                " runs, and whether --supervisor is its address"
            ) from error
        if not isinstance(found, dict):
            raise AgentError(f"{self._url} answers, and is no supervisor")
        return found


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(1 << 16))["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"it answers {error.code} {error.reason}"
