"""Talks to a running Kubernetes cluster of a test, as an administrator or with a token."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

from tests.cluster.tools import find_tools
from tests.patience import PATIENCE

__all__ = ["WRITES", "ApiError", "Cluster", "CommandFailed", "Write", "address_in_pods", "wait_for"]

#: Verbs of the audit log.
WRITES = "create", "update", "patch", "delete", "deletecollection"

T = TypeVar("T")


class CommandFailed(RuntimeError):
    """A command ended with another code than 0; the message has what it wrote to its standard error."""


class ApiError(RuntimeError):
    """The API server refused a request."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"HTTP {code}: {message}")
        self.code = code


@dataclass(frozen=True)
class Write:
    """A request of the audit log."""

    user: str
    verb: str
    #: Such as "pods" or "nodes/status".
    resource: str
    namespace: str
    name: str
    code: int
    #: Of the token, "JTI=ID"; "": the user has shown none.
    credential: str = field(default="", compare=False)


def wait_for(what: str, probe: Callable[[], T], *, timeout_s: float = 60, every_s: float = 0.1) -> T:
    """What ``probe`` returns, once that is true; an error of the API or of a command, and a field that is not
    there, count as "not yet".

    Raises:
        AssertionError: the time is over; says what was waited for, and the last answer.
    """
    timeout_s *= PATIENCE
    deadline = monotonic() + timeout_s
    while True:
        try:
            answer = probe()
            if answer:
                return answer
            said = repr(answer)
        except (OSError, LookupError, ApiError, CommandFailed) as error:
            said = repr(error)
        assert monotonic() < deadline, f"{what}: not within {timeout_s} s; the last answer was {said}"
        sleep(every_s)


def address_in_pods(told: str) -> str:
    """Where a process pod listens whose ``podIP`` is this one; see :mod:`tests.cluster.process_kubelet`."""
    return told.replace("10.", "127.", 1)


class Cluster:
    """A running control plane, known by the folder in which :class:`~tests.cluster.control_plane.ControlPlane` keeps its
    files. Any thread, any process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def kubeconfig(self) -> Path:
        """Of the administrator."""
        return self.kubeconfig_of("admin")

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @cached_property
    def server(self) -> str:
        """The address of the API server."""
        address: str = json.loads(self.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        return address

    def kubeconfig_of(self, user: str) -> Path:
        return self.folder / f"{user}.kubeconfig"

    # ---- commands

    def kubectl(self, *arguments: str, input: str | None = None, timeout_s: float = 60) -> str:
        """What kubectl prints.

        Raises:
            CommandFailed: it did not end with 0.
        """
        return self._run("kubectl", arguments, input, timeout_s)

    def helm(self, *arguments: str, input: str | None = None, timeout_s: float = 60) -> str:
        """As :meth:`kubectl`, of Helm 4."""
        return self._run("helm", arguments, input, timeout_s)

    def helm3(self, *arguments: str, input: str | None = None, timeout_s: float = 60) -> str:
        """As :meth:`kubectl`, of Helm 3."""
        return self._run("helm3", arguments, input, timeout_s)

    def _run(self, program: str, arguments: tuple[str, ...], input: str | None, timeout_s: float) -> str:
        home = self.folder / "home"  # of helm's caches and of kubectl's, which are else those of the user
        environment = {"KUBECONFIG": str(self.kubeconfig), "HOME": str(home), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [find_tools() / program, *arguments],
            env=environment, input=input, capture_output=True, text=True, timeout=PATIENCE * timeout_s,
        )  # fmt: skip
        if done.returncode:
            raise CommandFailed(f"{program} {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def apply(self, *objects: dict[str, Any] | str) -> None:
        """Makes or changes objects; a text is YAML."""
        documents = [each if isinstance(each, str) else json.dumps(each) for each in objects]
        self.kubectl("apply", "--server-side", "-f", "-", input="\n---\n".join(documents))

    # ---- requests

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        content_type: str = "application/json",
        timeout_s: float = 30,
    ) -> Any:
        """The decoded answer to one request, which takes some milliseconds where kubectl takes a hundred.

        Args:
            token: of whom; None: the administrator.
            content_type: "application/merge-patch+json" and its like for a PATCH.

        Raises:
            ApiError: the answer was not 2xx.
        """
        headers = {"Content-Type": content_type} | ({"Authorization": f"Bearer {token}"} if token else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server + path, data, headers, method=method)
        trust = self._anonymous if token else self.administrator
        try:
            with urllib.request.urlopen(request, context=trust, timeout=PATIENCE * timeout_s) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(error.code, error.read().decode(errors="replace")) from None

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def patch(self, path: str, changes: dict[str, Any]) -> Any:
        """Merges changes into an object."""
        return self.request("PATCH", path, changes, content_type="application/merge-patch+json")

    def pods(self, namespace: str, selector: str = "") -> list[Any]:
        found: list[Any] = self.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")["items"]
        return found

    def token(self, namespace: str, account: str, *, audience: str | None = None, pod: str | None = None) -> str:
        """A new token of a ServiceAccount, for an hour; bound to a pod if one is named."""
        spec: dict[str, Any] = {"audiences": [audience] if audience else []}
        if pod is not None:
            spec["boundObjectRef"] = {"kind": "Pod", "apiVersion": "v1", "name": pod}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        token: str = self.request("POST", path, {"spec": spec})["status"]["token"]
        return token

    @cached_property
    def _anonymous(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))

    @cached_property
    def administrator(self) -> ssl.SSLContext:
        """Proves that a request is the administrator's."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.folder / "admin.crt", self.folder / "admin.key")
        return context

    # ---- what was done

    def writes(self, user: str | None = None, verb: str | None = None) -> list[Write]:
        """Requests that were to change something, in order, refused ones too.

        An entry comes some milliseconds after the answer: wait for what must come. That of a ServiceAccount is
        "system:serviceaccount:NAMESPACE:NAME". Verbs: :data:`WRITES`.
        """
        return [each for each in self.requests(user) if each.verb in WRITES and verb in (None, each.verb)]

    def requests(self, user: str | None = None) -> list[Write]:
        """As :meth:`writes`, with what ServiceAccounts that are not Kubernetes' own have read, too."""
        complete = (self.folder / "audit.log").read_text().rpartition("\n")[0]
        requests = [_write(json.loads(line)) for line in complete.splitlines()]
        return [each for each in requests if user in (None, each.user)]


def _write(event: Any) -> Write:
    target = event.get("objectRef", {})
    resource = "/".join(filter(None, (target.get("resource", ""), target.get("subresource"))))
    code = event.get("responseStatus", {}).get("code", 0)
    namespace, name = target.get("namespace", ""), target.get("name", "")
    (credential,) = event["user"].get("extra", {}).get("authentication.kubernetes.io/credential-id", [""])
    return Write(event["user"].get("username", ""), event["verb"], resource, namespace, name, code, credential)
