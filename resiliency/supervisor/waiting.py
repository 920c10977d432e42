"""Says what a workload waits for, to people. Pure: no input, no output, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from resiliency.supervisor.model import Host, HostState, WorkloadSpec

__all__ = ["names", "waits_for"]

_MOST_NAMES = 8


def waits_for(
    spec: WorkloadSpec,
    *,
    ready: Collection[str],
    hosts: Iterable[Host],
    unheard: Collection[str],
    has_pods: bool,
    of_others: Mapping[str, int],
    unnamed: Collection[str] = (),
) -> str:
    """What a workload without places waits for, in words.

    Args:
        ready: hosts that it could be given.
        hosts: those that have connected and have no place.
        unheard: hosts that the cluster has started and that have not connected.
        has_pods: the cluster starts the hosts, as pods.
        of_others: how many ready hosts other jobs have, by their names.
        unnamed: ready hosts of which the cluster has not said to which job they belong.
    """
    enough = f", and {spec.min_hosts} are enough" if spec.min_hosts < spec.hosts else ""
    said = [f"{len(ready)} of {spec.hosts} hosts are ready{enough}"]
    away = [host for host in hosts if host.state is not HostState.READY]
    joining = [host.name for host in away if host.state is HostState.JOINING]
    if joining:
        said.append(f"{names(joining)} {'is' if len(joining) == 1 else 'are'} joining")
    for host in [host for host in away if host.state is not HostState.JOINING][:_MOST_NAMES]:
        said.append(f"{host.name} is {host.state}" + (f" ({host.reason})" if host.reason else ""))
    if unheard:
        said.append(f"{names(unheard)} {'has' if len(unheard) == 1 else 'have'} not connected yet")
    if unnamed:
        said.append(f"to which job {names(unnamed)} belong is not known yet: the log says why pods cannot be followed")
    missing = spec.hosts - len(ready) - len(away) - len(unheard) - len(unnamed)
    if missing > 0 and has_pods:
        said.append(f"{missing} {'has' if missing == 1 else 'have'} no pod on a node: kubectl get pods says why")
    elif missing > 0:
        said.append(f"{missing} {'has' if missing == 1 else 'have'} never connected")
    said += [f"{count} ready hosts belong to {job}, which is another job" for job, count in of_others.items()]
    return "; ".join(said)


def names(found: Collection[str]) -> str:
    """The first names, and how many more there are."""
    shown = sorted(found)
    more = f" and {len(shown) - _MOST_NAMES} more" if len(shown) > _MOST_NAMES else ""
    return ", ".join(shown[:_MOST_NAMES]) + more
