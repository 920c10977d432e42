"""What KWOK's simulated nodes and pods go through, and the annotations by which a test decides.

Annotations: ``test/dead`` on a node ends its heartbeats (NotReady a minute later), on a pod it keeps it Terminating for
ever, as on a host that is gone; ``test/fail`` ends a running pod with 137, ``test/succeed`` with 0.
"""

from __future__ import annotations

from typing import Any

import yaml

__all__ = ["CONFIGURATION"]

_NODE = """\
{{{{ $now := Now }}}}
phase: Running
conditions:
{{{{ range NodeConditions }}}}
- {{ type: {{{{ .type | Quote }}}}, status: {{{{ .status | Quote }}}}, reason: {{{{ .reason | Quote }}}}, \
message: {{{{ .message | Quote }}}}, lastHeartbeatTime: {{{{ $now | Quote }}}}{transition} }}
{{{{ end }}}}
"""
_POD = """\
{{{{ $now := Now }}}}
phase: {phase}
{more}
containerStatuses:
{{{{ range .spec.containers }}}}
- {{ name: {{{{ .name | Quote }}}}, image: {{{{ .image | Quote }}}}, ready: {ready}, started: {ready}, restartCount: 0, state: {{ {state} }} }}
{{{{ end }}}}
"""
_READY = "startTime: {{ $now | Quote }}\nconditions:\n" + "\n".join(
    f'- {{ type: {name}, status: "True", lastTransitionTime: {{{{ $now | Quote }}}} }}'
    for name in ("Initialized", "ContainersReady", "Ready")
)
_STARTED = "startedAt: {{ $now | Quote }}"


def _where(key: str, *values: str, absent: bool = False) -> dict[str, Any]:
    if values:
        return {"key": key, "operator": "NotIn" if absent else "In", "values": list(values)}
    return {"key": key, "operator": "DoesNotExist" if absent else "Exists"}


def _annotated(name: str, *, absent: bool = False) -> dict[str, Any]:
    return _where(f'.metadata.annotations["test/{name}"]', absent=absent)


def _stage(name: str, kind: str, where: list[dict[str, Any]], then: str | None, **more: Any) -> dict[str, Any]:
    spec = {
        "resourceRef": {"apiGroup": "v1", "kind": kind},
        "selector": {"matchExpressions": where},
        "next": {"delete": True} if then is None else {"statusTemplate": then},
        **more,
    }
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": name}, "spec": spec}


def _ended(phase: str, code: int) -> str:
    reason = "Error" if code else "Completed"
    state = f"terminated: {{ exitCode: {code}, reason: {reason}, {_STARTED}, finishedAt: {{{{ $now | Quote }}}} }}"
    return _POD.format(phase=phase, more="", ready="false", state=state)


def _stages() -> list[dict[str, Any]]:
    ready = '.status.conditions.[] | select(.type == "Ready") | .status'
    phase, deleted = ".status.phase", ".metadata.deletionTimestamp"
    transition = ", lastTransitionTime: {{ $now | Quote }}"
    running = _POD.format(phase="Running", more=_READY, ready="true", state=f"running: {{ {_STARTED} }}")
    alive, kept, going = _annotated("dead", absent=True), _where(deleted, absent=True), _where(deleted)
    now = _where(phase, "Running")
    beat = {"delay": {"durationMilliseconds": 8000, "jitterDurationMilliseconds": 12000}, "immediateNextStage": True}
    return [
        _stage("node-up", "Node", [_where(ready, "True", absent=True), alive], _NODE.format(transition=transition)),
        _stage("node-heartbeat", "Node", [_where(ready, "True"), alive], _NODE.format(transition=""), **beat),
        _stage("pod-running", "Pod", [kept, _where(phase, "Pending")], running),
        _stage("pod-failed", "Pod", [kept, now, _annotated("fail")], _ended("Failed", 137)),
        _stage("pod-succeeded", "Pod", [kept, now, _annotated("succeed")], _ended("Succeeded", 0)),
        # As a real kubelet: a deleted pod has failed first, and then goes; Jobs may wait for that.
        _stage(
            "pod-terminate", "Pod", [going, alive, _where(phase, "Running", "Pending")], _ended("Failed", 143)
        ),
        _stage("pod-delete", "Pod", [going, alive, _where(phase, "Failed", "Succeeded")], None),
    ]  # fmt: skip


#: The text of KWOK's configuration file.
CONFIGURATION = yaml.safe_dump_all(
    [
        {
            "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
            "kind": "KwokConfiguration",
            "options": {"podPlayStageParallelism": 32, "nodePlayStageParallelism": 16},
        },
        *_stages(),
    ]
)
