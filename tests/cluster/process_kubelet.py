"""Runs the pods of one node of a test cluster as processes of this machine: ``CLUSTER_FOLDER NODE FOLDER``.

Each container is process 1 of namespaces of its own, and ends with this process: SIGKILL to it is the death of a node.
Images, resource limits and users are ignored; pods share the network of the machine, and each has an address of its own
in 127.0.0.0/8, on which a server in it should listen. The API server, which refuses endpoints on loopback, is told
10.x.y.z for 127.x.y.z. A name leads to the addresses of a Service's ready endpoints, so that the port of a Service must
be that of its pods.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import shlex
import ssl
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import aiohttp
from aiohttp import web

from tests.cluster.client import ApiError, Cluster, address_in_pods
from tests.cluster.tools import REPOSITORY
from tests.processes import child_pids

Json = Any

#: Where a pod has file systems of its own, so that the machine keeps what it has there.
HIDDEN = "/run", "/pod", "/etc/resiliency", "/var/lib/resiliency"
HEARTBEAT_S = 4.0
#: The longest time before a container is started again; the first time it is 0.2 s, and then twice as long each time.
LONGEST_BACKOFF_S = 10.0
#: After which part of its life a token is replaced.
TOKEN_AGE = 0.8
FAILURES = aiohttp.ClientError, asyncio.TimeoutError, ApiError
MERGE = "application/strategic-merge-patch+json"

logger = logging.getLogger("kubelet")


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def second() -> str:
    return now()[:19] + "Z"


class Api:
    """Requests to the API server, as the kubelet."""

    def __init__(self, cluster: Cluster) -> None:
        self.server = cluster.server
        trust = ssl.create_default_context(cafile=str(cluster.ca))
        trust.load_cert_chain(cluster.folder / "kubelet.crt", cluster.folder / "kubelet.key")
        connector = aiohttp.TCPConnector(ssl=trust, limit=0)
        self.session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 22)

    async def request(self, method: str, path: str, body: Json = None, kind: str = "application/json") -> Json:
        data = None if body is None else json.dumps(body)
        limit = aiohttp.ClientTimeout(total=10)
        address = self.server + path
        async with self.session.request(
            method, address, data=data, headers={"Content-Type": kind}, timeout=limit
        ) as answer:
            if answer.status >= 300:
                raise ApiError(answer.status, f"{method} {path}: {await answer.text()}")
            return await answer.json()

    async def follow(self, path: str, selector: str, changed: Callable[[dict[str, Json]], None]) -> None:
        """Calls ``changed`` with all objects by uid, at first and each time that one differs, for ever."""
        limit = aiohttp.ClientTimeout(total=None, sock_read=75)
        while True:
            with _logged(f"watch of {path}"):
                listed = await self.request("GET", f"{path}?{selector}")
                objects = {item["metadata"]["uid"]: item for item in listed["items"]}
                changed(objects)
                version = listed["metadata"]["resourceVersion"]
                watch = f"{self.server}{path}?{selector}&watch=1&timeoutSeconds=60&resourceVersion={version}"
                async with self.session.get(watch, timeout=limit) as events:
                    async for line in events.content:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        objects.pop(event["object"]["metadata"]["uid"], None)
                        if event["type"] != "DELETED":
                            objects[event["object"]["metadata"]["uid"]] = event["object"]
                        changed(objects)
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """The API server may be away: it is asked again later."""
    try:
        yield
    except FAILURES as error:
        logger.warning("%s: %r", what, error)


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception():
        logger.error("a task ended", exc_info=task.exception())


class Container:
    """One container of a pod, and the processes that it is one after another."""

    def __init__(self, pod: Pod, spec: Json, rule: str) -> None:
        self.pod, self.spec, self.rule = pod, spec, rule
        self.name: str = spec["name"]
        self.log = pod.folder / f"{self.name}.log"
        self.process: asyncio.subprocess.Process | None = None
        self.code: int | None = None
        self.ready = self.started = False
        self.restarts = 0
        self.state: Json = {"waiting": {"reason": "ContainerCreating"}}
        self.last: Json = {}

    async def run(self) -> None:
        """Until it is not to be started any more."""
        while not self.pod.deleted.is_set():
            try:
                code = await self._run_once()
                if self.rule == "Never" or (self.rule == "OnFailure" and code == 0):
                    return
            except FAILURES as error:  # what a variable is read from is not there, or the API server
                self.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
                self.pod.changed.set()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.pod.deleted.wait(), min(LONGEST_BACKOFF_S, 0.2 * 2**self.restarts))
            self.restarts += not self.pod.deleted.is_set()

    async def _run_once(self) -> int:
        began = second()
        command, environment = await self._command()
        mark = self.pod.folder / f"{self.name}.started"
        mark.unlink(missing_ok=True)
        script = "\n".join(["set -e", *self._mounts(), f"touch {mark}", 'exec setsid "$@"'])
        with open(self.log, "ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                "setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child",
                "--mount-proc", "sh", "-c", script, "sh", *command,
                env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        ended = asyncio.create_task(self.process.wait())
        while not mark.exists() and not ended.done():
            await asyncio.sleep(0.02)
        self.started, self.state, self.ready = (
            True,
            {"running": {"startedAt": began}},
            "readinessProbe" not in self.spec,
        )
        if self.pod.deleted.is_set():
            self.kill()
        self.pod.changed.set()
        probes = [asyncio.create_task(probe) for probe in self._probes()]
        code = await ended
        for probe in probes:
            probe.cancel()
        self.code = code if code >= 0 else 128 - code
        reason = "Error" if self.code else "Completed"
        ending = {"exitCode": self.code, "reason": reason, "startedAt": began, "finishedAt": second()}
        self.process, self.started, self.ready = None, False, False
        self.state = self.last = {"terminated": ending}
        self.pod.changed.set()
        return self.code

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to process 1, and SIGKILL to all after ``grace_s``."""
        process = self.process
        if process is None:
            return
        for pid in child_pids(str(process.pid)) if self.started else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), grace_s)
        if process.returncode is None:
            process.send_signal(SIGKILL)

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(SIGKILL)

    def status(self) -> Json:
        return {
            "name": self.name,
            "image": self.spec.get("image", "none"),
            "imageID": "",
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last if self.restarts else {},
        }

    # ---- what it sees

    async def _command(self) -> tuple[list[str], dict[str, str]]:
        address, _, port = self.pod.api.server.removeprefix("https://").rpartition(":")
        seen = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.environ.get("HOME", "/root"),
            "HOSTNAME": self.pod.hostname,
            "KUBERNETES_SERVICE_HOST": address,
            "KUBERNETES_SERVICE_PORT": port,
        }

        def expanded(text: str) -> str:
            return re.sub(r"\$\((\w+)\)", lambda found: seen.get(found[1], found[0]), text)

        for each in self.spec.get("env", ()):
            source = each.get("valueFrom")
            seen[each["name"]] = await self.pod.value(source) if source else expanded(each.get("value", ""))
        words = [*self.spec.get("command", ()), *self.spec.get("args", ())]
        return [expanded(word) for word in words], seen

    def _mounts(self) -> Iterator[str]:
        yield f"echo {shlex.quote(self.pod.hostname)} > /proc/sys/kernel/hostname"
        yield f"mount --bind {self.pod.hosts} /etc/hosts"
        paths = [mount["mountPath"] for mount in self.spec.get("volumeMounts", ())]
        for hidden in HIDDEN:
            if any(_below(os.path.realpath(path), hidden) for path in paths):
                yield f"mkdir -p {hidden}; mount -t tmpfs pod {hidden}"
        hiding = []
        for mount in self.spec.get("volumeMounts", ()):
            path = os.path.realpath(mount["mountPath"])
            source = shlex.quote(str(self.pod.volumes[mount["name"]] / mount.get("subPath", "")))
            if any(_below(path, hidden) for hidden in HIDDEN):
                yield f"mkdir -p {os.path.dirname(path)}; [ -f {source} ] && touch {path} || mkdir -p {source} {path}"
                yield f"mount --bind {source} {path}"
            elif not os.path.exists(path):
                yield f"echo 'no mount point {path} here: take one below {' or '.join(HIDDEN)}'; exit 128"
            else:
                hiding.append((source, path))
        for source, path in hiding:  # last, for /tmp may be one, below which all others are
            for kept in {str(REPOSITORY), sys.prefix, str(self.pod.folder)}:
                if _below(kept, path):
                    there = f"{source}/{os.path.relpath(kept, path)}"
                    yield f"mkdir -p {there}; mount --bind {kept} {there}"
            yield f"mount --rbind {source} {path}"
        yield f"cd {shlex.quote(self.spec.get('workingDir', '/'))}"

    # ---- probes

    def _probes(self) -> Iterator[Any]:
        def set_ready(ready: bool) -> None:
            self.ready = ready
            self.pod.changed.set()

        def restart_dead(alive: bool) -> None:
            if not alive:
                logger.warning("%s/%s does not answer its liveness probe", self.pod.name, self.name)
                self.pod.spawn(self.stop(self.pod.spec.get("terminationGracePeriodSeconds", 30)))

        if probe := self.spec.get("readinessProbe"):
            yield self._probe(probe, set_ready)
        if probe := self.spec.get("livenessProbe"):
            yield self._probe(probe, restart_dead)

    async def _probe(self, probe: Json, decided: Callable[[bool], None]) -> None:
        """Calls ``decided`` when enough answers in a row are good, or bad."""
        target = probe["httpGet"]
        names = {port.get("name"): port["containerPort"] for port in self.spec.get("ports", ())}
        scheme, port = target.get("scheme", "HTTP").lower(), names.get(target["port"], target["port"])
        address = f"{scheme}://{target.get('host', self.pod.ip)}:{port}{target.get('path', '/')}"
        enough = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
        limit = aiohttp.ClientTimeout(total=probe.get("timeoutSeconds", 1))
        last, in_a_row = False, 0
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while True:
            try:
                async with self.pod.api.session.get(address, ssl=False, timeout=limit) as answer:
                    good = 200 <= answer.status < 400
            except (aiohttp.ClientError, asyncio.TimeoutError):
                good = False
            last, in_a_row = good, in_a_row + 1 if good is last else 1
            if in_a_row == enough[good]:
                decided(good)
            await asyncio.sleep(probe.get("periodSeconds", 10))


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
        self.tokens: list[tuple[Path, Json]] = []
        rule = self.spec.get("restartPolicy", "Always")
        self.first = [
            Container(self, each, "Always" if each.get("restartPolicy") == "Always" else "Never" if rule == "Never" else "OnFailure")
            for each in self.spec.get("initContainers", ())
        ]  # fmt: skip
        self.containers = [Container(self, each, rule) for each in self.spec["containers"]]
        self.phase, self.message, self.began = "Pending", "", second()
        self.conditions: dict[str, tuple[bool, str]] = {}
        self.deleted, self.changed = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._life = asyncio.create_task(self._run())
        self._life.add_done_callback(_log_fault)

    def spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_fault)

    def delete(self, grace_s: float) -> None:
        """Stops it once; kills it if there is no more time."""
        if not self.deleted.is_set():
            self.deleted.set()
            for each in self._all():
                self.spawn(each.stop(grace_s))
        if not grace_s:
            for each in self._all():
                each.kill()

    def _all(self) -> list[Container]:
        return [*self.first, *self.containers]

    async def _run(self) -> None:
        self.spawn(self._report())
        if await self._prepare():
            self.phase = "Running"
            self.spawn(self._renew_tokens())
            await asyncio.gather(*(each.run() for each in self.containers))
        for each in self.first:
            each.rule = "Never"
            await each.stop(1)
        self.phase = "Failed" if any(each.code != 0 for each in self.containers) else "Succeeded"
        self.changed.set()
        await self.deleted.wait()
        for task in self._tasks.copy():
            task.cancel()
        await self._post()
        with _logged(self.path):
            await self.api.request("DELETE", self.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})

    async def _prepare(self) -> bool:
        """Volumes and the containers that come first; False: it failed, or was deleted."""
        while not self.deleted.is_set() and len(self.volumes) < len(self.spec.get("volumes", ())):
            try:
                self.volumes = {each["name"]: await self._volume(each) for each in self.spec.get("volumes", ())}
            except FAILURES as error:  # what a volume needs may come later than the pod
                self.message = str(error)
                self.changed.set()
                await asyncio.sleep(0.5)
        self.message = ""
        for each in self.first:
            if each.spec.get("restartPolicy") == "Always":
                self.spawn(each.run())
                continue
            await each.run()
            if each.code != 0:
                return False
        return not self.deleted.is_set()

    # ---- what its containers see

    async def _volume(self, volume: Json) -> Path:
        if "hostPath" in volume:
            path = Path(volume["hostPath"]["path"])
            if volume["hostPath"].get("type") == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            return path
        folder = Path(self.folder, "volumes", volume["name"])
        folder.mkdir(parents=True, exist_ok=True)
        sources = volume.get("projected", {}).get("sources", [volume])
        for source in sources:
            if token := source.get("serviceAccountToken"):
                await self._write_token(folder / token["path"], token)
                self.tokens.append((folder / token["path"], token))
            for kind in "configMap", "secret":
                if kind in source:
                    await self._write_files(folder, kind, source[kind])
            for item in source.get("downwardAPI", {}).get("items", ()):
                _write(folder / item["path"], self._field(item["fieldRef"]["fieldPath"]).encode())
        return folder

    async def _write_token(self, path: Path, request: Json) -> None:
        bound = {"kind": "Pod", "apiVersion": "v1", "name": self.name, "uid": self.uid}
        audiences = [request["audience"]] if "audience" in request else []
        spec = {
            "audiences": audiences,
            "expirationSeconds": request.get("expirationSeconds", 3600),
            "boundObjectRef": bound,
        }
        account = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{self.spec['serviceAccountName']}"
        made = await self.api.request("POST", f"{account}/token", {"spec": spec})
        _write(path, made["status"]["token"].encode())

    async def _renew_tokens(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for path, request in self.tokens:
                if time.time() - path.stat().st_mtime > TOKEN_AGE * request.get("expirationSeconds", 3600):
                    with _logged(f"token of {self.name}"):
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
        for kind, holds in ("Initialized", running), ("ContainersReady", ready), ("Ready", ready):
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
            "initContainerStatuses": [each.status() for each in self.first],
        }


class Node:
    """The node, its heartbeats, and the pods that are bound to it."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        self.cluster, self.name, self.folder = cluster, name, folder
        self.api = Api(cluster)
        self.pods: dict[str, Pod] = {}
        self.endpoints: list[Json] = []

    async def run(self) -> None:
        port = await self._serve_logs()
        await asyncio.gather(
            self._beat(port),
            self.api.follow("/api/v1/pods", f"fieldSelector=spec.nodeName%3D{self.name}", self._pods_changed),
            self.api.follow("/apis/discovery.k8s.io/v1/endpointslices", "limit=0", self._endpoints_changed),
        )

    def _pods_changed(self, objects: dict[str, Json]) -> None:
        for uid, found in objects.items():
            if uid not in self.pods and found["status"].get("phase") not in ("Succeeded", "Failed"):
                self.pods[uid] = Pod(self, found)
            if uid in self.pods and "deletionTimestamp" in found["metadata"]:
                self.pods[uid].delete(found["metadata"].get("deletionGracePeriodSeconds", 30))
        for uid in self.pods.keys() - objects.keys():
            self.pods.pop(uid).delete(0)

    def _endpoints_changed(self, objects: dict[str, Json]) -> None:
        self.endpoints = list(objects.values())
        for pod in self.pods.values():
            pod.write_hosts()

    async def _beat(self, port: int) -> None:
        began = second()
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "nodeInfo": {"bootID": str(uuid.uuid4()), "machineID": self.name, "kubeletVersion": "v1.36.3"},
        }
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": began}
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        while True:
            with _logged("heartbeat"):
                body = {"status": {**status, "conditions": [{**ready, "lastHeartbeatTime": second()}]}}
                await self.api.request("PATCH", f"/api/v1/nodes/{self.name}/status", body, MERGE)
                lease = {"spec": {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": now()}}
                try:
                    await self.api.request("PATCH", f"{leases}/{self.name}", lease, MERGE)
                except ApiError as error:
                    if error.code != 404:
                        raise
                    await self.api.request("POST", leases, {"metadata": {"name": self.name}, **lease})
            await asyncio.sleep(HEARTBEAT_S)

    async def _serve_logs(self) -> int:
        application = web.Application()
        application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._answer_logs)
        runner = web.AppRunner(application)
        await runner.setup()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cluster.folder / "server.crt", self.cluster.folder / "server.key")
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        return int(runner.addresses[0][1])

    async def _answer_logs(self, request: web.Request) -> web.Response:
        for pod in self.pods.values():
            if (pod.namespace, pod.name) == (request.match_info["namespace"], request.match_info["pod"]):
                lines = (pod.folder / f"{request.match_info['container']}.log").read_bytes().splitlines(True)
                return web.Response(body=b"".join(lines[-int(request.query.get("tailLines", len(lines))) :]))
        raise web.HTTPNotFound


def _names(found: Json, namespace: str) -> Iterator[str]:
    """The lines of a file of hosts for one EndpointSlice, as seen from a namespace."""
    there = found["metadata"]["namespace"]
    service = found["metadata"].get("labels", {}).get("kubernetes.io/service-name")
    for each in found.get("endpoints") or () if service else ():
        if each.get("conditions", {}).get("ready", True):
            for name in filter(None, (service, each.get("hostname") and f"{each['hostname']}.{service}")):
                names = [f"{name}.{there}{end}" for end in ("", ".svc", ".svc.cluster.local")]
                yield " ".join([address_in_pods(each["addresses"][0]), *names, *([name] if there == namespace else [])])


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"..{path.name}")
    partial.write_bytes(data)
    partial.chmod(0o600)
    partial.replace(path)


async def main(cluster: str, node: str, folder: str) -> None:
    await Node(Cluster(Path(cluster)), node, Path(folder)).run()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
