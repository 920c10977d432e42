"""Runs the pods of one node of a test cluster as processes of this machine: ``CLUSTER_FOLDER NODE FOLDER``.

Each container is process 1 of namespaces of its own, and ends with this process: SIGKILL to it is the death of a node.
Images, init containers, resource limits and users are ignored; volumes of kinds that are not here, such as claims, are
empty folders; a hostPath of type DirectoryOrCreate is of the node, others are of the machine. Pods share the network of
the machine, and each has an address of its own in 127.0.0.0/8, on which a server in it should listen. The API server,
which refuses endpoints on loopback, is told 10.x.y.z for 127.x.y.z. A name leads to the addresses of a Service's ready
endpoints, so that the port of a Service must be that of its pods.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
import uuid
from pathlib import Path

from aiohttp import web

from tests.cluster.client import ApiError, Cluster
from tests.cluster.kubelet_api import MERGE, Api, Json, logged, now, second
from tests.cluster.process_pod import Pod

HEARTBEAT_S = 4.0


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
            with logged("heartbeat"):
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


async def main(cluster: str, node: str, folder: str) -> None:
    await Node(Cluster(Path(cluster)), node, Path(folder)).run()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
