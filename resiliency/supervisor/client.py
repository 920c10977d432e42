"""HTTP client of the supervisor for the command line. It uses only the standard library."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from resiliency.errors import AgentError, ConfigError
from resiliency.runtime.addresses import STANDS_BY_STATUS, supervisor_urls

__all__ = ["OperatorClient"]

_TIMEOUT_S = 10.0
#: Timeout, in seconds, of the question whether a supervisor leads, where there are several addresses.
_PROBE_S = 2.0
_MOST_BYTES = 64 << 20


class OperatorClient:
    """Sends operators' requests to the supervisor that leads. Thread: any. Blocks: up to 10 s for a request; with
    several addresses up to 12 s for each of them.

    Args:
        urls: ``http://host:port`` or ``https://host:port`` of every supervisor that shares the state file.
        token: the operators' token; "": none.
        ca: file with the certificates to trust; "": the system's.
        cert, key: files with this client's certificate and key, for a supervisor that asks for one.

    Raises:
        ConfigError: an address is not valid, or a file cannot be read.
    """

    def __init__(self, *urls: str, token: str = "", ca: str = "", cert: str = "", key: str = "") -> None:
        self._urls, self._token, self._cert = supervisor_urls(urls), token, cert
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if any(url.startswith("https:") for url in self._urls):
            try:
                context = ssl.create_default_context(cafile=ca or None)
                if cert:
                    context.load_cert_chain(cert, key or None)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{ca} {cert} {key}: {error}") from error
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, **query: object) -> dict[str, Any]:
        """Returns the JSON object that the supervisor answers.

        Raises:
            AgentError: no supervisor can be reached, or it refuses; the error says what to do.
        """
        return self._ask("GET", path, query)

    def post(self, path: str, **query: object) -> dict[str, Any]:
        """Sends a request that changes something; returns and raises as :meth:`get`."""
        return self._ask("POST", path, query)

    def _ask(self, method: str, path: str, query: dict[str, object]) -> dict[str, Any]:
        given = {key: value for key, value in query.items() if value not in ("", None)}
        target = urllib.parse.quote(path) + (f"?{urllib.parse.urlencode(given)}" if given else "")
        said = []
        for url in self._likeliest_first():
            try:
                return self._ask_one(method, url, target)
            except _NotHere as error:
                said.append(str(error))
        raise AgentError(". ".join(said))

    def _likeliest_first(self) -> list[str]:
        """Sorts the addresses: supervisors that lead, then those that answer, then those that do not."""
        return sorted(self._urls, key=self._readiness) if len(self._urls) > 1 else list(self._urls)

    def _readiness(self, url: str) -> int:
        try:
            with self._opener.open(f"{url}/readyz", timeout=_PROBE_S):
                return 0
        except urllib.error.HTTPError as error:
            error.close()
            return 1
        except (OSError, http.client.HTTPException, ValueError):
            return 2

    def _ask_one(self, method: str, url: str, target: str) -> dict[str, Any]:
        request = urllib.request.Request(url + target, method=method)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                found = json.loads(response.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            kind = _NotHere if error.code == STANDS_BY_STATUS else AgentError
            raise kind(f"{url}: {_reason(error)}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "reason", error)
            raise _NotHere(
                f"no supervisor answers at {url}: {why}. Training goes on without it; see whether its process"
                f" runs, and whether --supervisor is its address{self._hint(url, error)}"
            ) from error
        if not isinstance(found, dict):
            raise AgentError(f"{url} answers, and is no supervisor")
        return found

    def _hint(self, url: str, error: Exception) -> str:
        """Returns advice to pass a certificate, or "". A client without one is often cut off without a reason."""
        is_cut = isinstance(error, (ConnectionError, ssl.SSLError, http.client.HTTPException))
        if not url.startswith("https:") or self._cert or not is_cut:
            return ""
        return ". If its tls has a client_ca it wants a certificate of yours: --cert FILE --key FILE"


class _NotHere(AgentError):
    """This address is not the leader's; the supervisor that leads may be at another one."""


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(1 << 16))["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"it answers {error.code} {error.reason}"
