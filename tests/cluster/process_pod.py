"""A pod whose containers are processes of this machine."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.client import ApiError, address_in_pods
from tests.cluster.kubelet_api import FAILURES, MERGE, Json, log_fault, logged, second
from tests.cluster.pod_container import Container

if TYPE_CHECKING:
    from tests.cluster.process_kubelet import Node

__all__ = ["Pod"]

#: After which part of its life a token is replaced.
TOKEN_AGE = 0.8

logger = logging.getLogger("kubelet")


class Pod:
    """One pod, from the time when it is bound to the node until its object is gone."""

    def __init__(self, node: Node, found: Json) -> None:
        self.node, self.api, self.object, self.spec = node, node.api, found, found["spec"]
        meta = found["metadata"]
        self.uid, self.namespace, self.name = meta["uid"], meta["namespace"], meta["name"]
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self.hostname: str = self.spec.get("hostname", self.name)
        number = uuid.UUID(self.uid).int
        self.ip = f"127.{number % 200 + 20}.{number // 200 % 256}.{number // 51200 % 250 + 1}"
        self.folder = node.folder / self.uid
        self.folder.mkdir(exist_ok=True)  # there after a reboot of the node
        self.hosts = self.folder / "hosts"
        self.write_hosts()
        self.volumes: dict[str, Path] = {}
        self.tokens: dict[Path, Json] = {}
        rule = self.spec.get("restartPolicy", "Always")
        self.containers = [Container(self, each, rule) for each in self.spec["containers"]]
        self.phase, self.message, self.began = "Pending", "", second()
        self.conditions: dict[str, tuple[bool, str]] = {}
        self.deleted, self.changed = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._life = asyncio.create_task(self._run())
        self._life.add_done_callback(log_fault)

    def spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_fault)

    def delete(self, grace_s: float) -> None:
        """Stops it once; kills it if there is no more time."""
        if not self.deleted.is_set():
            self.deleted.set()
            for each in self.containers:
                self.spawn(each.stop(grace_s))
        if not grace_s:
            for each in self.containers:
                each.kill()

    async def _run(self) -> None:
        self.spawn(self._report())
        await self._make_volumes()
        if not self.deleted.is_set():
            self.phase = "Running"
            self.spawn(self._renew_tokens())
            await asyncio.gather(*(each.run() for each in self.containers))
        self.phase = "Failed" if any(each.code != 0 for each in self.containers) else "Succeeded"
        self.changed.set()
        await self.deleted.wait()
        for task in self._tasks.copy():
            task.cancel()
        await self._post()
        with logged(self.path):
            await self.api.request("DELETE", self.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})

    # ---- what its containers see

    async def _make_volumes(self) -> None:
        volumes = self.spec.get("volumes", ())
        while not self.deleted.is_set() and len(self.volumes) < len(volumes):
            try:
                self.volumes = {each["name"]: await self._volume(each) for each in volumes}
                self.message = ""
            except FAILURES as error:  # what a volume needs may come later than the pod
                self.message = str(error)
                self.changed.set()
                await asyncio.sleep(0.5)

    async def _volume(self, volume: Json) -> Path:
        if "hostPath" in volume:
            path = Path(volume["hostPath"]["path"])
            if volume["hostPath"].get("type") == "DirectoryOrCreate":  # of this node, not of the machine
                path = Path(f"{self.node.folder}/disk{path}")
                path.mkdir(parents=True, exist_ok=True)
            return path
        folder = Path(self.folder, "volumes", volume["name"])
        folder.mkdir(parents=True, exist_ok=True)
        sources = volume.get("projected", {}).get("sources", [volume])
        for source in sources:
            if token := source.get("serviceAccountToken"):
                await self._write_token(folder / token["path"], token)
                self.tokens[folder / token["path"]] = token
            for kind in "configMap", "secret":
                if kind in source:
                    await self._write_files(folder, kind, source[kind])
            for item in source.get("downwardAPI", {}).get("items", ()):
                _write(folder / item["path"], self._field(item["fieldRef"]["fieldPath"]).encode())
        return folder

    async def _write_token(self, path: Path, request: Json) -> None:
        spec = {
            "audiences": [request["audience"]] if "audience" in request else [],
            "expirationSeconds": request.get("expirationSeconds", 3600),
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": self.name, "uid": self.uid},
        }
        account = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{self.spec['serviceAccountName']}"
        made = await self.api.request("POST", f"{account}/token", {"spec": spec})
        _write(path, made["status"]["token"].encode())

    async def _renew_tokens(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for path, request in self.tokens.items():
                if time.time() - path.stat().st_mtime > TOKEN_AGE * request.get("expirationSeconds", 3600):
                    with logged(f"token of {self.name}"):
                        await self._write_token(path, request)

    async def _write_files(self, folder: Path, kind: str, source: Json) -> None:
        try:
            data = await self._data(kind, source.get("name", source.get("secretName")))
        except ApiError as error:
            if error.code == 404 and source.get("optional"):
                return
            raise
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            _write(folder / item["path"], data[item["key"]])

    async def _data(self, kind: str, name: str) -> dict[str, bytes]:
        path = f"/api/v1/namespaces/{self.namespace}/{kind.lower()}s/{name}"
        data = (await self.api.request("GET", path)).get("data", {})
        return {key: base64.b64decode(text) if kind == "secret" else text.encode() for key, text in data.items()}

    async def value(self, source: Json) -> str:
        """Of a variable."""
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        kind = "secret" if "secretKeyRef" in source else "configMap"
        reference = source[f"{kind}KeyRef"]
        return (await self._data(kind, reference["name"]))[reference["key"]].decode()

    def _field(self, path: str) -> str:
        known = {"status.podIP": self.ip, "status.podIPs": self.ip, "status.hostIP": "127.0.0.1"}
        if path in known:
            return known[path]
        if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return str(self.object["metadata"].get(found[1], {}).get(found[2], ""))
        value = self.object
        for part in path.split("."):
            value = value.get(part, {})
        return str(value or "")

    def write_hosts(self) -> None:
        """In place, for the file is mounted; the length comes last, so that no reader finds it empty."""
        domain = f"{self.spec['subdomain']}.{self.namespace}.svc.cluster.local" if "subdomain" in self.spec else "local"
        lines = ["127.0.0.1 localhost", f"{self.ip} {self.hostname}.{domain} {self.hostname}"]
        lines += [line for found in self.node.endpoints for line in _names(found, self.namespace)]
        text = ("\n".join(lines) + "\n").encode()
        descriptor = os.open(self.hosts, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
        os.close(descriptor)

    # ---- what the API server is told

    async def _report(self) -> None:
        while True:
            await self.changed.wait()
            self.changed.clear()
            await self._post()

    async def _post(self) -> None:
        while True:
            try:
                body = {"metadata": {"uid": self.uid}, "status": self._status()}
                await self.api.request("PATCH", f"{self.path}/status", body, MERGE)
                return
            except FAILURES as error:
                if isinstance(error, ApiError) and error.code in (404, 409):  # gone, or another pod of this name
                    return
                logger.warning("status of %s: %r", self.name, error)
            await asyncio.sleep(0.5)

    def _status(self) -> Json:
        running = self.phase == "Running"
        ready = running and all(each.ready for each in self.containers)
        for kind, holds in ("Initialized", True), ("ContainersReady", ready), ("Ready", ready):
            if self.conditions.get(kind, (None,))[0] is not holds:
                self.conditions[kind] = holds, second()
        told = self.ip.replace("127.", "10.", 1)
        return {
            "phase": self.phase,
            "message": self.message,
            "hostIP": "127.0.0.1",
            "podIP": told,
            "podIPs": [{"ip": told}],
            "startTime": self.began,
            "conditions": [
                {"type": kind, "status": str(holds), "lastTransitionTime": since}
                for kind, (holds, since) in self.conditions.items()
            ],
            "containerStatuses": [each.status() for each in self.containers],
        }


def _names(found: Json, namespace: str) -> Iterator[str]:
    """The lines of a file of hosts for one EndpointSlice, as seen from a namespace."""
    there = found["metadata"]["namespace"]
    service = found["metadata"].get("labels", {}).get("kubernetes.io/service-name")
    for each in found.get("endpoints") or () if service else ():
        if each.get("conditions", {}).get("ready", True):
            for name in filter(None, (service, each.get("hostname") and f"{each['hostname']}.{service}")):
                names = [f"{name}.{there}{end}" for end in ("", ".svc", ".svc.cluster.local")]
                yield " ".join([address_in_pods(each["addresses"][0]), *names, *([name] if there == namespace else [])])


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"..{path.name}")
    partial.write_bytes(data)
    partial.chmod(0o600)
    partial.replace(path)
