"""A real Kubernetes control plane on this machine, without containers: etcd, API server, controllers, JobSet and KWOK.

As a program it keeps one for a whole run of the tests: ``python -m tests.cluster.control_plane FOLDER``.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.client import WRITES, Cluster, wait_for
from tests.cluster.kwok_stages import CONFIGURATION
from tests.cluster.tools import find_tools
from tests.ports import free_port
from tests.processes import wait_stopped

__all__ = ["READY", "RUNNING", "USERS", "ControlPlane"]

#: Below the folder of a kept control plane: its own folder; a file of which each user has a shared lock; a file that is
#: there once all runs.
RUNNING, USERS, READY = "running", "users", "ready"

_HOST = "127.0.0.1"
#: Certificates: the file's name, and whom it names.
_SUBJECTS = {
    "server": "/CN=kube-apiserver",
    "admin": "/O=system:masters/CN=admin",
    "kubelet": "/O=system:masters/CN=process-kubelet",
    "controllers": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "jobset": "/O=system:masters/CN=jobset-controller",
    "kwok": "/O=system:masters/CN=kwok",
}
_NAMES = "DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:10.0.0.1"
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {"level": "Metadata", "verbs": [*WRITES]},
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}
_JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "none"},
    "spec": {"replicatedJobs": [{"name": "none", "template": {"spec": {"template": {"spec": {
        "restartPolicy": "Never", "containers": [{"name": "none", "image": "none"}],
    }}}}}]},
}  # fmt: skip


class ControlPlane(Cluster):
    """Starts a control plane in about ten seconds, and ends it with the ``with`` statement, or with this process.

    For tests that stop the API server; others share the fixture ``control_plane``. One thread, which must live as long
    as the control plane: the kernel ends the programs with the thread that started them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tools = find_tools()
        self._etcd, self._port = free_port(), free_port()
        folder.mkdir(parents=True)

    def __enter__(self) -> ControlPlane:
        try:
            self._make_certificates()
            self._start_etcd()
            self._start_api_server()
            self._start_controllers()
            self._start_jobset()
            (self.folder / "kwok.yaml").write_text(CONFIGURATION)
            self._start(
                "kwok", f"--kubeconfig={self.kubeconfig_of('kwok')}", f"--config={self.folder}/kwok.yaml",
                "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake", "--node-lease-duration-seconds=0",
                f"--server-address={_HOST}:{free_port()}",
            )  # fmt: skip
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    # ---- an API server that is away

    @contextlib.contextmanager
    def frozen_api_server(self) -> Iterator[None]:
        """It keeps its connections and answers nothing."""
        process = self._processes["kube-apiserver"]
        process.send_signal(signal.SIGSTOP)
        try:
            wait_stopped(process.pid)
            yield
        finally:
            process.send_signal(signal.SIGCONT)
        self._wait_for_api_server()

    @contextlib.contextmanager
    def without_api_server(self) -> Iterator[None]:
        """It is killed, and started again at the end on the same port, with the same etcd."""
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait()
        try:
            yield
        finally:
            self._start_api_server()

    def forget_history(self) -> None:
        """Watches that begin at an earlier version than the present one are refused with 410, as hours later."""
        etcd = f"http://{_HOST}:{self._etcd}/v3/kv"
        key = base64.b64encode(b"none").decode()
        revision = _post(f"{etcd}/range", {"key": key})["header"]["revision"]
        _post(f"{etcd}/compaction", {"revision": revision, "physical": True})

    # ---- its parts

    def _make_certificates(self) -> None:
        folder = self.folder
        key = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"
        for name, subject in ("ca", "/CN=test-ca"), ("accounts", "/CN=service-accounts"):
            _openssl("req", "-x509", *key, "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt", "-subj", subject)  # fmt: skip
        for name, subject in _SUBJECTS.items():
            files = "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt"
            signer = "-CA", f"{folder}/ca.crt", "-CAkey", f"{folder}/ca.key"
            plain = "-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"subjectAltName={_NAMES}"
            _openssl("req", "-x509", *key, *files, *signer, "-subj", subject, *plain)
            self.kubeconfig_of(name).write_text(json.dumps(self._kubeconfig(name)))
        webhook = folder / "webhook"
        webhook.mkdir()
        for end in "crt", "key":
            shutil.copy(folder / f"server.{end}", webhook / f"tls.{end}")

    def _kubeconfig(self, user: str) -> dict[str, Any]:
        files = {"client-certificate": f"{self.folder}/{user}.crt", "client-key": f"{self.folder}/{user}.key"}
        server = {"server": f"https://{_HOST}:{self._port}", "certificate-authority": str(self.ca)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": user, "user": files}],
        }

    def _start_etcd(self) -> None:
        clients, peers = f"http://{_HOST}:{self._etcd}", f"http://{_HOST}:{free_port()}"
        self._start(
            "etcd", f"--data-dir={self.folder}/etcd", "--unsafe-no-fsync",
            f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}", f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}",
        )  # fmt: skip

    def _start_api_server(self) -> None:
        folder = self.folder
        (folder / "audit-policy.yaml").write_text(json.dumps(_AUDIT_POLICY))
        self._start(
            "kube-apiserver", f"--etcd-servers=http://{_HOST}:{self._etcd}", f"--bind-address={_HOST}",
            f"--secure-port={self._port}", f"--advertise-address={_HOST}", f"--tls-cert-file={folder}/server.crt",
            f"--tls-private-key-file={folder}/server.key", f"--client-ca-file={self.ca}",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={folder}/accounts.crt",
            f"--service-account-signing-key-file={folder}/accounts.key", "--service-cluster-ip-range=10.0.0.0/16",
            "--authorization-mode=Node,RBAC", "--allow-privileged=true", "--enable-priority-and-fairness=false",
            # A namespace decides on which nodes its pods run: the tests share one cluster.
            "--enable-admission-plugins=PodNodeSelector",
            f"--audit-policy-file={folder}/audit-policy.yaml", f"--audit-log-path={folder}/audit.log",
        )  # fmt: skip
        self._wait_for_api_server()

    def _wait_for_api_server(self) -> None:
        self._wait("the API server", f"https://{_HOST}:{self._port}/readyz")

    def _start_controllers(self) -> None:
        def shared(user: str) -> list[str]:
            flags = "kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"
            files = [f"--{flag}={self.kubeconfig_of(user)}" for flag in flags]
            limits = "--kube-api-qps=200", "--kube-api-burst=400", "--leader-elect=false"
            return [*files, *limits, f"--bind-address={_HOST}", f"--secure-port={free_port()}"]

        self._start(
            "kube-controller-manager", *shared("controllers"), f"--root-ca-file={self.ca}",
            f"--service-account-private-key-file={self.folder}/accounts.key", "--use-service-account-credentials=true",
            "--controllers=*,-nodeipam,-cloud-node-lifecycle-controller,-service-lb-controller,-node-route-controller",
            "--node-monitor-grace-period=45s", "--node-monitor-period=2s",
        )  # fmt: skip
        self._start("kube-scheduler", *shared("scheduler"))

    def _start_jobset(self) -> None:
        """The CRD, rights and webhooks of the chart; only the controller is a process here instead of a pod."""
        namespace, port, health = "jobset-system", free_port(), free_port()
        chart = next(self._tools.glob("jobset-*.tgz"))
        rendered = self.helm("template", "jobset", str(chart), "-n", namespace, "--include-crds")
        objects = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] != "Deployment"]
        authority = base64.b64encode(self.ca.read_bytes()).decode()
        for hook in [hook for each in objects for hook in each.get("webhooks", ())]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://{_HOST}:{port}{path}", "caBundle": authority}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        self.apply(*objects)
        configuration = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"{_HOST}:{health}"},
            "clientConnection": {"qps": 200, "burst": 400},
            "internalCertManagement": {"enable": False},
            "webhook": {"host": _HOST, "port": port, "certDir": f"{self.folder}/webhook"},
        }
        (self.folder / "jobset.yaml").write_text(json.dumps(configuration))
        self._start("jobset", f"--kubeconfig={self.kubeconfig_of('jobset')}", f"--config={self.folder}/jobset.yaml")
        self._wait("the JobSet controller", f"http://{_HOST}:{health}/readyz")
        # It is ready some moments before its webhooks are.
        path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets?dryRun=All"
        wait_for("JobSet's webhooks", lambda: self.request("POST", path, _JOBSET), every_s=0.05)

    # ---- processes

    def _start(self, name: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", self._tools / name, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _wait(self, what: str, address: str) -> None:
        def answers() -> bool:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    log = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{name} ended with {process.returncode}, and the cluster with it:\n{log}")
            trust = self._anonymous if address.startswith("https") else None
            with urllib.request.urlopen(address, context=trust, timeout=2) as answer:
                return bool(answer.status == 200)

        wait_for(f"{what} (logs: {self.folder})", answers, timeout_s=90, every_s=0.05)

    def _end(self) -> None:
        """API server and etcd last; none has anything to save."""
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        self._processes.clear()


def _post(address: str, body: dict[str, Any]) -> Any:
    with urllib.request.urlopen(address, json.dumps(body).encode(), timeout=10) as answer:
        return json.loads(answer.read())


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"openssl {' '.join(arguments)}: {done.stderr}")


def keep(folder: Path) -> None:
    """Runs a control plane in ``folder`` until nobody has a lock of its file of users; then removes the folder.

    A lock is of one process and ends with it, so that killed users count no more.
    """
    with open(folder / USERS, "r+") as users:
        try:
            with ControlPlane(folder / RUNNING):
                (folder / READY).touch()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever waits for this program reads until here
                os.dup2(1, 2)
                fcntl.lockf(users, fcntl.LOCK_EX)
        finally:
            gone = folder.rename(folder.with_suffix(".gone"))
            shutil.rmtree(gone)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
