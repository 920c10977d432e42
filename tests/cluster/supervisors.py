"""Supervisors as processes of this machine, with what the chart has given to their pods: settings, rights, certificate."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import ssl
import urllib.request
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from resiliency.testing.zygote import WorkerProcess, Zygote
from tests.cluster.client import Cluster, Write, wait_for
from tests.ports import free_port
from tests.processes import wait_stopped
from tests.supervisor.supervisor_command import MODULE

__all__ = ["Identity", "SupervisorProcess"]

_WHERE = {"state: /var/lib/resiliency": "state: {state}", "/etc/resiliency": "{files}"}
_ASIDE = "leases", "tokenreviews", "selfsubjectaccessreviews"


class Identity:
    """What the pods of a release's supervisors have.

    Args:
        folder: gets files that the pods would have mounted.
    """

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, *, release: str = "supervisor") -> None:
        self.cluster, self.namespace, self.folder, self.release = cluster, namespace, folder, release
        self._write("tls", "tls")
        self._write("operator", "operator")

    def _write(self, secret: str, folder: str) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{self.release}-{secret}"
        (self.folder / folder).mkdir(parents=True)
        for name, value in self.cluster.get(path)["data"].items():
            file = self.folder / folder / name
            file.touch(mode=0o600)
            file.write_bytes(base64.b64decode(value))

    @property
    def ca(self) -> Path:
        return self.folder / "tls" / "ca.crt"

    @property
    def operator_token(self) -> str:
        return (self.folder / "operator" / "token").read_text().strip()

    @cached_property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))

    def settings(self, state: Path, token: Path) -> dict[str, Any]:
        """The file of the ConfigMap, with paths of this machine instead of the pod's."""
        path = f"/api/v1/namespaces/{self.namespace}/configmaps/{self.release}"
        text: str = self.cluster.get(path)["data"]["supervisor.yaml"]
        for pods, ours in _WHERE.items():
            text = text.replace(pods, ours.format(state=state, files=self.folder))
        made: dict[str, Any] = yaml.safe_load(text)
        made["kubernetes"] |= {
            "server": self.cluster.server,
            "token_file": str(token),
            "ca_file": str(self.cluster.ca),
            "namespace": self.namespace,
        }
        return made

    def write_token(self, file: Path) -> None:
        """A new one of the release's ServiceAccount."""
        file.write_text(self.cluster.token(self.namespace, self.release))


class SupervisorProcess:
    """``resiliency supervisor run`` of one replica, a fork in a process group of its own."""

    def __init__(self, identity: Identity, folder: Path, zygote: Zygote) -> None:
        self.identity, self._zygote = identity, zygote
        folder.mkdir()
        self.token, self.log, self.state = folder / "token", folder / "log", folder / "supervisor.db"
        identity.write_token(self.token)
        self.log.touch()
        self._file = folder / "supervisor.yaml"
        self._file.write_text(json.dumps(identity.settings(folder, self.token)))
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.process = self._start()

    def _start(self) -> WorkerProcess:
        words = ["supervisor", "run", "-f", str(self._file), "--listen", f"127.0.0.1:{self.port}"]
        given = {"words": words, "environment": dict(os.environ), "log": str(self.log)}
        return self._zygote.start(f"{MODULE}:run_command", given)

    def freeze(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)
        wait_stopped(self.process.pid)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout_s=10)

    def begin_again(self, *, keep_state: bool) -> None:
        self.kill()
        if not keep_state:
            for file in self.state.parent.glob("supervisor.db*"):
                file.unlink()
        self.process = self._start()

    def terms(self) -> list[int]:
        """Of its leaderships."""
        return [int(term) for term in re.findall(r"leads in term (\d+)", self.log.read_text())]

    def writes(self) -> list[Write]:
        """What it has asked the API server to change with its present token, but for its Lease and reviews of tokens."""
        claims = json.loads(base64.urlsafe_b64decode(self.token.read_text().split(".")[1] + "=="))
        mine = [each for each in self.identity.cluster.writes() if each.credential == f"JTI={claims['jti']}"]
        return [each for each in mine if each.resource not in _ASIDE]

    def status(self, *, hosts: bool = True) -> dict[str, Any]:
        """What it answers to ``resiliency supervisor status``, if it leads; of many hosts without them."""
        headers = {"Authorization": f"Bearer {self.identity.operator_token}"}
        request = urllib.request.Request(f"{self.url}/v1/status?hosts={int(hosts)}", headers=headers)
        with urllib.request.urlopen(request, context=self.identity.trust, timeout=5) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def until_it_leads(self) -> int:
        """Its term."""
        wait_for(f"a supervisor leads ({self.log})", self.terms, timeout_s=30)
        return self.terms()[-1]
