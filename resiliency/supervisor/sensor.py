"""Tells which hosts are alive and can be given ranks. Pure: callers pass in what was heard, and the time.

The only thing that it infers is silence, and it is careful with that: when the supervisor itself did not run for a
while, or when more than half of all hosts fall silent at once, the hosts are probably not at fault. Hosts report at
different moments of a period, so a cut network makes them late one after the other: a late host counts as silent only
when enough other hosts were heard after its report was due.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from resiliency.errors import ConfigError
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.supervisor.model import Host, HostState

__all__ = ["Sensor", "SensorSettings"]

logger = logging.getLogger(__name__)

#: Quarantine doubles with each fall of a host, at most this many times.
_MOST_DOUBLINGS = 6
#: How late a report may be, as a share of the timeout less one period: a host sleeps for a period between two reports,
#: and its other work comes on top.
_LATENESS = 0.25
#: After this many timeouts of silence, a host without a place no longer counts towards many being silent at once.
_LASTING = 3


@dataclass(frozen=True, kw_only=True)
class SensorSettings:
    """When a host counts as silent, and for how long it is kept out.

    Attributes:
        period_s: seconds between two heartbeats of a host.
        timeout_s: a host that was not heard for this long is silent.
        freeze_fraction: when more than this share of all hosts is silent at once, nothing is done about any of them.
        thaw_s: fewer must have been silent for this long before anything is done again; for at least a timeout plus a
            period while some of them are still silent.
        quarantine_s: first time in quarantine; doubled with each fall that follows within ``forgive_s``.
        forgive_s: after this long without a fall, earlier falls no longer count.
        forget_s: a silent host without a place is forgotten after this long.
    """

    period_s: float = 5.0
    timeout_s: float = 10.0
    freeze_fraction: float = 0.5
    thaw_s: float = 5.0
    quarantine_s: float = 30.0
    forgive_s: float = 3600.0
    forget_s: float = 86_400.0

    def __post_init__(self) -> None:
        if not 0 < self.period_s < self.timeout_s:
            raise ConfigError(
                f"heartbeat_polling_period_s={self.period_s}, heartbeat_timeout_s={self.timeout_s}: pass a period above"
                " 0, and a timeout of more than one period"
            )
        if not 0 < self.freeze_fraction <= 1:
            raise ConfigError(f"freeze_fraction={self.freeze_fraction}: pass more than 0, up to 1")
        for name in ("thaw_s", "quarantine_s", "forgive_s", "forget_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: pass 0 or more seconds")


class Sensor:
    """The states of all hosts. Thread: one. Blocks: never.

    Args:
        now_s: monotonic seconds.
    """

    def __init__(self, settings: SensorSettings, now_s: float) -> None:
        self._settings = settings
        #: Sorted by when each host was last heard, the oldest first, so that a look stops at the first host that is not
        #: late.
        self._hosts: OrderedDict[str, Host] = OrderedDict()
        #: The state that each silent host had before; without hosts that were given up.
        self._silent: dict[str, HostState] = {}
        self._looked_s = now_s
        self._frozen = False
        #: While frozen: since when no longer too many hosts are silent.
        self._enough_since_s: float | None = None
        self._names_changed: set[str] = set()
        self._ready: set[str] = set()
        self._cordoned: set[str] = set()
        #: Cordoned hosts that are silent. They do not count as a sign of network trouble, and stay cordoned.
        self._mute: set[str] = set()
        #: Increased whenever a host becomes READY or stops being READY.
        self.ready_version = 0

    # -- reading the state --------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """So many hosts are silent that none of them counts as lost."""
        return self._frozen

    def host(self, name: str) -> Host | None:
        return self._hosts.get(name)

    def hosts(self) -> list[Host]:
        return sorted(self._hosts.values(), key=lambda host: host.name)

    def states(self) -> Counter[HostState]:
        """How many hosts are in each state."""
        return Counter(host.state for host in self._hosts.values())

    @property
    def cordoned(self) -> AbstractSet[str]:
        """Names of the hosts that are CORDONED."""
        return self._cordoned

    @property
    def count(self) -> int:
        """Number of known hosts."""
        return len(self._hosts)

    @property
    def ready(self) -> AbstractSet[str]:
        """Names of the hosts that are READY."""
        return self._ready

    def state_of(self, name: str) -> HostState | None:
        host = self._hosts.get(name)
        return None if host is None else host.state

    def take_changed(self) -> set[str]:
        """Returns, and resets, the names of hosts whose state has changed since the last call."""
        changed, self._names_changed = self._names_changed, set()
        return changed

    # -- what is heard ------------------------------------------------------------------------------------------------

    def restore(self, hosts: Iterable[Host], now_s: float, *, given_up: Collection[str] = ()) -> None:
        """Takes over the hosts that an earlier supervisor knew. They have a timeout plus a period to report.

        Args:
            given_up: names of silent hosts that are not waited for.
        """
        for host in hosts:
            if host.state is HostState.SILENT and host.name in given_up:
                self._hosts[host.name] = replace(host, heard_s=now_s - self._settings.timeout_s, since_s=now_s)
                self._hosts.move_to_end(host.name, last=False)
                continue
            state = HostState.JOINING if host.state in (HostState.READY, HostState.SILENT) else host.state
            # The monotonic clock may have started again: no quarantine may become longer than it was.
            free_at_s = min(host.free_at_s, now_s + self._quarantine_s(host.falls))
            heard_s = now_s + self._settings.period_s
            self._hosts[host.name] = replace(host, state=state, heard_s=heard_s, since_s=now_s, free_at_s=free_at_s)
            if state is HostState.CORDONED:
                self._cordoned.add(host.name)

    def heard(self, name: str, incarnation: str, now_s: float, *, address: str = "", block: str = "") -> None:
        """A host has sent something. If it was silent, or its monitor was restarted, its state changes accordingly."""
        host = self._hosts.get(name)
        if host is None:
            host = Host(name=name, incarnation=incarnation, state=HostState.JOINING, heard_s=now_s, since_s=now_s)
            self._names_changed.add(name)
        elif host.incarnation != incarnation and host.left:
            host = self._come_back(host, now_s)
        elif host.incarnation != incarnation and host.state is HostState.READY:
            host = self._changed(host, HostState.JOINING, "its monitor was started again", now_s)
        elif host.state is HostState.SILENT:
            host = self._back(host, incarnation, now_s)
        self._mute.discard(name)
        if host.incarnation != incarnation or address or block:
            address, block = address or host.address, block or host.block
            host = replace(host, incarnation=incarnation, address=address, block=block)
        self._hosts[name] = _heard_at(host, max(now_s, host.heard_s))
        self._hosts.move_to_end(name)

    def left(self, name: str, now_s: float) -> None:
        """The host's monitor was told to end. The host gets no ranks, and when another monitor of it connects it is
        treated like any other: this does not count as a fall."""
        host = self._hosts.get(name)
        if host is not None and not host.left:
            falls = host.falls
            self.quarantine(name, "its monitor was told to end", now_s)
            self._hosts[name] = replace(self._hosts[name], left=True, falls=falls)

    def _come_back(self, host: Host, now_s: float) -> Host:
        self._silent.pop(host.name, None)
        host = replace(host, left=False)
        if host.state is HostState.CORDONED:
            return host
        return replace(self._changed(host, HostState.JOINING, "its monitor was started again", now_s), free_at_s=now_s)

    def _back(self, host: Host, incarnation: str, now_s: float) -> Host:
        """A silent host is heard again. If it was not replaced meanwhile, it continues in the state it had before."""
        before = self._silent.pop(host.name, None)
        if before is None:
            return self._fallen(host, "it was silent", now_s)
        falls = self._falls(host, now_s)
        if before is HostState.QUARANTINED:  # silence does not make a quarantine shorter
            free_at_s = max(host.free_at_s, now_s)
            return replace(self._changed(host, before, host.reason, now_s), falls=falls, free_at_s=free_at_s)
        state = before if incarnation == host.incarnation else HostState.JOINING
        return replace(self._changed(host, state, "", now_s), falls=falls, free_at_s=now_s)

    def checked(self, name: str, problem: str, now_s: float) -> None:
        """A check of the host has ended.

        Args:
            problem: what is wrong with the host; "": nothing.
        """
        host = self._hosts.get(name)
        if host is None or host.state in (HostState.SILENT, HostState.CORDONED):
            return
        if problem:
            self.quarantine(name, problem, now_s)
        elif host.state is HostState.JOINING or (host.state is HostState.QUARANTINED and now_s >= host.free_at_s):
            self._hosts[name] = self._changed(host, HostState.READY, "", now_s)

    def to_check(self, now_s: float) -> list[str]:
        """Hosts that would become ready by passing a check."""
        return [
            host.name
            for host in self._hosts.values()
            if host.state is HostState.JOINING or (host.state is HostState.QUARANTINED and now_s >= host.free_at_s)
        ]

    def quarantine(self, name: str, reason: str, now_s: float) -> None:
        """Keeps ranks off the host for a while, and until a check has passed."""
        host = self._hosts.get(name)
        if host is None or host.state in (HostState.SILENT, HostState.CORDONED):
            return  # a silent host is quarantined when it comes back
        self._hosts[name] = self._fallen(host, reason, now_s)

    def cordon(self, name: str, reason: str, now_s: float) -> bool:
        """Takes a host out until :meth:`uncordon`. Returns False when the host is unknown."""
        host = self._hosts.get(name)
        if host is None:
            return False
        self._silent.pop(name, None)
        self._hosts[name] = self._changed(host, HostState.CORDONED, reason, now_s)
        return True

    def uncordon(self, name: str, now_s: float) -> bool:
        """Has the host checked, after which it is ready. Returns False when it is unknown or not cordoned."""
        host = self._hosts.get(name)
        if host is None or host.state is not HostState.CORDONED:
            return False
        self._mute.discard(name)
        self._hosts[name] = replace(self._changed(host, HostState.JOINING, "it was cordoned", now_s), falls=0)
        return True

    def _fallen(self, host: Host, reason: str, now_s: float) -> Host:
        falls = self._falls(host, now_s)
        fallen = self._changed(host, HostState.QUARANTINED, reason, now_s)
        return replace(fallen, falls=falls, free_at_s=now_s + self._quarantine_s(falls))

    def _falls(self, host: Host, now_s: float) -> int:
        """The host's number of falls, with one more."""
        return 1 if now_s - host.free_at_s > self._settings.forgive_s else host.falls + 1

    def _quarantine_s(self, falls: int) -> float:
        return self._settings.quarantine_s * 2.0 ** min(max(falls - 1, 0), _MOST_DOUBLINGS)

    def _changed(self, host: Host, state: HostState, reason: str, now_s: float) -> Host:
        if state is not host.state:
            logger.info("host %s is %s (was %s)%s", host.name, state, host.state, reason and f": {reason}")
            host = replace(host, since_s=now_s)
            if HostState.READY in (state, host.state):
                self.ready_version += 1
            (self._ready.add if state is HostState.READY else self._ready.discard)(host.name)
            (self._cordoned.add if state is HostState.CORDONED else self._cordoned.discard)(host.name)
        self._names_changed.add(host.name)
        return replace(host, state=state, reason=reason)

    # -- silence ------------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> list[Observation]:
        """Returns an observation for each host that has just become silent. To be called at least once a period."""
        self._forgive_own_absence(now_s)
        late: list[Host] = []
        fell, gone = [], []
        for host in self._hosts.values():
            if now_s - host.heard_s <= self._settings.timeout_s:
                break  # the others were heard later
            if host.state not in (HostState.SILENT, HostState.CORDONED):
                late.append(host)
            elif host.state is HostState.CORDONED and host.name not in self._mute:
                self._mute.add(host.name)
                gone.append(host.name)
        for host in self._silent_of(late):
            reason = host.reason if host.state is HostState.QUARANTINED else ""
            self._silent[host.name] = host.state
            self._hosts[host.name] = self._changed(host, HostState.SILENT, reason, now_s)
            fell.append(host.name)
        self._freeze_or_thaw(now_s)
        lost = [
            Observation(kind=ObservationKind.HOST_LOST, host=name, detail="it is cordoned, and not heard of any more")
            for name in gone
        ]
        return lost + [
            Observation(
                kind=ObservationKind.HOST_SILENT,
                host=name,
                detail=f"not heard of for {now_s - self._hosts[name].heard_s:.1f} s",
            )
            for name in fell
        ]

    def _silent_of(self, late: list[Host]) -> list[Host]:
        """The late hosts that count as silent now. For the others it is unknown yet whether only they are late; it is
        known after a period at most, in which all hosts report or all are late."""
        if not late:
            return late
        counted = [one.heard_s for one in self._hosts.values() if self._counts(one)]
        if self._are_many(len(late) + len(self._silent), len(counted)):
            return late
        counted.sort()
        period_s, timeout_s = self._settings.period_s, self._settings.timeout_s
        due_s = period_s + _LATENESS * (timeout_s - period_s)
        return [host for host in late if not self._are_many(bisect_right(counted, host.heard_s + due_s), len(counted))]

    def _counts(self, host: Host) -> bool:
        """Whether the host counts when the share of silent hosts is computed."""
        if host.state is HostState.SILENT:
            return host.name in self._silent
        return host.state is not HostState.CORDONED

    def _are_many(self, silent: int, counted: int) -> bool:
        return silent >= 2 and silent > self._settings.freeze_fraction * counted

    def long_silent(self, now_s: float) -> list[str]:
        """Hosts that have been silent for long and were not given up: they tell nothing about what happens now."""
        lasting_s = _LASTING * self._settings.timeout_s
        silent = (self._hosts[name] for name in self._silent)
        return [host.name for host in silent if now_s - host.since_s > lasting_s]

    def give_up(self, name: str) -> None:
        """A silent host was replaced. It no longer counts as a sign of trouble, and is quarantined when it comes
        back."""
        self._silent.pop(name, None)

    def forget(self, name: str) -> None:
        """Forgets a host that is gone for good and has no place."""
        if self._hosts.pop(name, None) is not None:
            self._silent.pop(name, None)
            self._mute.discard(name)
            self._cordoned.discard(name)
            if name in self._ready:
                self._ready.discard(name)
                self.ready_version += 1
            self._names_changed.add(name)

    def silent_for(self, seconds: float, now_s: float) -> list[str]:
        """Hosts that have been silent for so long, cordoned ones too."""
        silent = []
        for host in self._hosts.values():
            if now_s - host.heard_s <= seconds:
                break  # the others were heard later
            if host.state is HostState.SILENT or host.name in self._mute:
                silent.append(host.name)
        return silent

    def forgotten(self, now_s: float) -> list[str]:
        """Hosts that have been silent for so long that they may be forgotten."""
        longest_s = self._settings.forget_s
        silent = (host for host in self._hosts.values() if host.state is HostState.SILENT)
        return [host.name for host in silent if now_s - host.heard_s > longest_s]

    def _forgive_own_absence(self, now_s: float) -> None:
        """While this process did not run it could not hear anything: hosts get that much longer to report."""
        away_s = now_s - self._looked_s - self._settings.period_s
        self._looked_s = now_s
        if away_s <= self._settings.timeout_s / 4:
            return
        logger.warning("the supervisor was away for %.1f s; hosts have that much longer to report", away_s)
        for name, host in self._hosts.items():
            self._hosts[name] = replace(host, heard_s=min(now_s, host.heard_s + away_s))
        if self._enough_since_s is not None:
            self._enough_since_s = min(now_s, self._enough_since_s + away_s)

    def _freeze_or_thaw(self, now_s: float) -> None:
        if not self._frozen and len(self._silent) < 2:
            return
        counted = sum(map(self._counts, self._hosts.values()))
        if self._are_many(len(self._silent), counted):
            self._enough_since_s = None
            if not self._frozen:
                self._frozen = True
                logger.error(
                    "%d of %d hosts have fallen silent: that is rather the network, or this supervisor, than so many"
                    " hosts; nothing is done about any until more are heard of. If they are gone, drain them:"
                    " resiliency supervisor drain HOST",
                    len(self._silent),
                    counted,
                )
        elif self._frozen:
            if self._enough_since_s is None:
                self._enough_since_s = now_s
            if now_s - self._enough_since_s >= self._thaw_s():
                self._frozen, self._enough_since_s = False, None
                logger.warning("enough hosts report again; those that are still silent are now judged")

    def _thaw_s(self) -> float:
        """How long no longer too many hosts must have been silent. Hosts do not notice all at once that a network works
        again: a monitor waits up to two periods between two attempts to connect. So those that are still silent have as
        long to report as after a restart of the supervisor."""
        if not self._silent:
            return self._settings.thaw_s
        return max(self._settings.thaw_s, self._settings.timeout_s + self._settings.period_s)


def _heard_at(host: Host, now_s: float) -> Host:
    """Does the same as :func:`dataclasses.replace` in a fifth of the time, because it is called for each message."""
    made = object.__new__(Host)
    made.__dict__.update(host.__dict__, heard_s=now_s)
    return made
