"""Decides what a client may do: each token of a monitor is bound to host names, and operators have a token of their
own."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import hmac
import os
import ssl
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resiliency.errors import ConfigError
from resiliency.runtime.addresses import NAME
from resiliency.supervisor.settings import SupervisorSettings, TlsSettings

__all__ = ["Authority", "server_context"]

_LEAST_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class _Entry:
    pattern: str
    digest: bytes


class Authority:
    """Checks tokens and certificates. Thread: any.

    Args:
        monitors: pattern of host names and token, for each token. Empty: see ``by_certificate``.
        operator: the operators' token; "": nobody may do what operators may.
        by_certificate: a client may speak for the hosts named in its certificate, which the TLS server has verified.
        insecure: every client may do everything.
    """

    def __init__(
        self,
        monitors: Sequence[tuple[str, str]],
        operator: str,
        *,
        by_certificate: bool = False,
        insecure: bool = False,
    ) -> None:
        self._entries = [_Entry(pattern=pattern, digest=_digest(token)) for pattern, token in monitors]
        self._operator = _digest(operator) if operator else None
        self._by_certificate, self.insecure = by_certificate, insecure

    @classmethod
    def of(cls, settings: SupervisorSettings) -> Authority:
        """Reads the token files that the settings name.

        Raises:
            ConfigError: a file cannot be used; or the settings name no authentication, and do not turn it off
                explicitly.
        """
        monitors = list(_tokens_of_hosts(settings.monitor_tokens)) if settings.monitor_tokens else []
        if settings.shared_token:
            monitors.append(("*", _token(settings.shared_token)))
        operator = _token(settings.operator_token) if settings.operator_token else ""
        by_certificate = settings.tls is not None and bool(settings.tls.client_ca)
        if settings.insecure_no_authentication:
            if monitors or operator:
                raise ConfigError("tokens and --insecure-no-authentication contradict each other; keep one of them")
            return cls((), "", insecure=True)
        if not monitors and not by_certificate and settings.cluster == "none":
            raise ConfigError(
                "nothing says which monitors are genuine: pass `monitor_tokens` (lines HOST-PATTERN TOKEN) or"
                " `shared_token` (a file with one token), or `client_ca` in `tls`. To listen without any, pass"
                " --insecure-no-authentication"
            )
        if not operator:
            raise ConfigError(
                "nothing says who may look, drain and stop: pass `operator_token`, a file with a token of its own"
                " (make one: head -c 32 /dev/urandom | base64 > operator.token)"
            )
        if any(hmac.compare_digest(_digest(operator), _digest(token)) for _, token in monitors):
            raise ConfigError("a monitor's token is the operators' as well: give the operators one of their own")
        return cls(monitors, operator, by_certificate=by_certificate)

    def monitor_patterns(self, header: str, certificate: Mapping[str, Any] | None) -> list[str]:
        """Patterns of the host names that this client may speak for; empty when it is no monitor."""
        if self.insecure:
            return ["*"]
        digest = _digest(_bearer(header))
        # Compare with every token, also after a match, so that the time taken tells nothing.
        found = [entry.pattern for entry in self._entries if hmac.compare_digest(entry.digest, digest)]
        if self._by_certificate:
            names = _names(certificate)
            # Where tokens are set as well, both the token and the certificate must allow the name.
            found = [name for name in names if not self._entries or _fits(name, found)]
        return found

    def allows_operator(self, header: str, *, to_look: bool = False) -> bool:
        """Whether the client is an operator.

        Args:
            to_look: the request changes nothing, so a password (HTTP basic authentication) is accepted too. For changes
                it is not, because a browser sends it by itself with every request, whichever page causes the request.
        """
        if self.insecure:
            return True
        token = _bearer(header) or (_password(header) if to_look else "")
        return self._operator is not None and hmac.compare_digest(self._operator, _digest(token))

    @staticmethod
    def token_of(header: str) -> str:
        """The bearer's token in an ``Authorization`` header; "" without one."""
        return _bearer(header)

    @staticmethod
    def may_speak_for(patterns: Sequence[str], host: str) -> bool:
        return NAME.fullmatch(host) is not None and _fits(host, patterns)


def _fits(host: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(host, pattern) for pattern in patterns)


def _digest(token: str) -> bytes:
    """A digest of the same length for all tokens, so that the time of a comparison tells nothing about a token."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _bearer(header: str) -> str:
    kind, _, token = header.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _password(header: str) -> str:
    kind, _, text = header.partition(" ")
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(text, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _names(certificate: Mapping[str, Any] | None) -> list[str]:
    """Host names in a verified certificate; empty without one."""
    if not certificate:
        return []
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return [name for name in (names or common) if NAME.fullmatch(name)]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o007:
        raise ConfigError(f"everybody on this host can read or write the token file {path}; chmod 600 {path}")
    return text


def _token(path: str) -> str:
    words = _read(path).split()
    if len(words) != 1:
        raise ConfigError(f"{path} holds {len(words)} words; a token file holds one")
    _check_length(words[0], path)
    return words[0]


def _tokens_of_hosts(path: str) -> list[tuple[str, str]]:
    found = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise ConfigError(f"{path}, line {number}: write HOST-PATTERN TOKEN, for example: node-* 3q2+7w...")
        _check_length(words[1], f"{path}, line {number}")
        found.append((words[0], words[1]))
    if not found:
        raise ConfigError(f"{path} holds no token; write lines of HOST-PATTERN TOKEN")
    return found


def _check_length(token: str, where: str) -> None:
    if len(token) < _LEAST_TOKEN:
        raise ConfigError(f"{where}: a token of {len(token)} characters can be guessed; use {_LEAST_TOKEN} or more")


def server_context(tls: TlsSettings | None) -> ssl.SSLContext | None:
    """The TLS context of the supervisor's server; None without TLS settings.

    Raises:
        ConfigError: a certificate or key cannot be used.
    """
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls: {tls.cert}, {tls.key}, {tls.client_ca or 'no client_ca'}: {error}") from error
    return context
