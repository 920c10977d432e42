"""One container of a pod that is processes: it starts, starts again, is probed and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.cluster.kubelet_api import FAILURES, Json, second
from tests.cluster.pod_mounts import mounts
from tests.processes import child_pids

if TYPE_CHECKING:
    from tests.cluster.process_pod import Pod

__all__ = ["Container"]

#: The longest time before a container is started again; the first time it is 0.2 s, and then twice as long each time.
LONGEST_BACKOFF_S = 10.0

logger = logging.getLogger("kubelet")


class Container:
    """One container of a pod, and the processes that it is one after another."""

    def __init__(self, pod: Pod, spec: Json, rule: str) -> None:
        self.pod, self.spec, self.rule = pod, spec, rule
        self.name: str = spec["name"]
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
        script = "\n".join(["set -e", *mounts(self.pod, self.spec), f"touch {mark}", 'exec setsid "$@"'])
        with open(self.pod.folder / f"{self.name}.log", "ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                "setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child",
                "--mount-proc", "sh", "-c", script, "sh", *command,
                env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        ended = asyncio.create_task(self.process.wait())
        while not mark.exists() and not ended.done():
            await asyncio.sleep(0.02)
        self.started, self.ready = True, "readinessProbe" not in self.spec
        self.state = {"running": {"startedAt": began}}
        first = child_pids(str(self.process.pid))
        (self.pod.folder / f"{self.name}.pid").write_text(" ".join(map(str, first)))  # for commands in the container
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
        enough = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
        last, in_a_row = False, 0
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while True:
            good = await (self._runs(probe) if "exec" in probe else self._answers(probe))
            last, in_a_row = good, in_a_row + 1 if good is last else 1
            if in_a_row == enough[good]:
                decided(good)
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _answers(self, probe: Json) -> bool:
        target = probe["httpGet"]
        names = {port.get("name"): port["containerPort"] for port in self.spec.get("ports", ())}
        scheme, port = target.get("scheme", "HTTP").lower(), names.get(target["port"], target["port"])
        address = f"{scheme}://{target.get('host', self.pod.ip)}:{port}{target.get('path', '/')}"
        limit = aiohttp.ClientTimeout(total=probe.get("timeoutSeconds", 1))
        try:
            async with self.pod.api.session.get(address, ssl=False, timeout=limit) as answer:
                return 200 <= answer.status < 400
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return False

    async def _runs(self, probe: Json) -> bool:
        first = (self.pod.folder / f"{self.name}.pid").read_text()
        enter = ("nsenter", "--mount", "--pid", "--target", first)
        process = await asyncio.create_subprocess_exec(*enter, *probe["exec"]["command"])
        try:
            return await asyncio.wait_for(process.wait(), probe.get("timeoutSeconds", 1)) == 0
        except asyncio.TimeoutError:
            process.kill()
            return False
