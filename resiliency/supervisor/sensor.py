"""Which hosts are there, and can be given ranks. Pure: it is told what was heard, and what time it is.

Silence is the only thing that it works out by itself, and it distrusts its own ears: when the supervisor itself was
stopped for a while, or when more than half of all hosts fall silent at once, it is not the hosts. Hosts report at
different moments of a period, so that a network that is cut makes them late one after the other: a host is silent when
enough of the others were heard of after its own report was due.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from resiliency.errors import ConfigError
from resiliency.supervisor.model import Host, HostState, Observation, ObservationKind

__all__ = ["Sensor", "SensorSettings"]

logger = logging.getLogger(__name__)

#: A host that falls again and again is kept in quarantine twice as long each time, up to 2 to the power of this.
_MOST_DOUBLINGS = 6
#: Part of what the timeout is longer than a period, by which a report may be later than its period: a host sleeps for a
#: period between two, and what it does besides comes on top.
_LATENESS = 0.25
#: Timeouts for which a host without a place may be silent before it counts no more for what falls silent at once.
_LASTING = 3


@dataclass(frozen=True, kw_only=True)
class SensorSettings:
    """
    Attributes:
        period_s: between heartbeats of a host.
        timeout_s: a host not heard of for this long is silent.
        freeze_fraction: more than this part of all hosts silent at once: nothing is done about any of them.
        thaw_s: for which fewer must have been silent before something is done again.
        quarantine_s: the first time; doubled with each fall that follows within ``forgive_s``.
        forgive_s: without a fall, after which those before count no more.
        forget_s: a silent host without a place is forgotten.
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
    """See the module. Thread: one. Blocks: never.

    Args:
        now_s: monotonic seconds.
    """

    def __init__(self, settings: SensorSettings, now_s: float) -> None:
        self._settings = settings
        #: The longest unheard first, so that a look at all of them is one at those that are silent.
        self._hosts: OrderedDict[str, Host] = OrderedDict()
        #: Hosts that are silent, with their state before; without those that were given up.
        self._silent: dict[str, HostState] = {}
        self._looked_s = now_s
        self._frozen = False
        self._thaws_at_s: float | None = None
        self._names_changed: set[str] = set()
        self._ready: set[str] = set()
        self._cordoned: set[str] = set()
        #: Cordoned hosts that are silent: they are no sign of trouble with the network, and stay cordoned.
        self._mute: set[str] = set()
        #: Grows when another host is ready, or one is no more.
        self.ready_version = 0

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """So many hosts are silent that none of them is taken for lost."""
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
        """Of the hosts that are known."""
        return len(self._hosts)

    @property
    def ready(self) -> AbstractSet[str]:
        """Names of the hosts that are READY."""
        return self._ready

    def state_of(self, name: str) -> HostState | None:
        host = self._hosts.get(name)
        return None if host is None else host.state

    def take_changed(self) -> set[str]:
        """Names of hosts whose state has changed since this was asked last."""
        changed, self._names_changed = self._names_changed, set()
        return changed

    # -- what is heard ------------------------------------------------------------------------------------------------

    def restore(self, hosts: Iterable[Host], now_s: float, *, given_up: Collection[str] = ()) -> None:
        """Hosts that a supervisor before this one knew. They have a timeout and a period to report.

        Args:
            given_up: names of silent ones that are not waited for.
        """
        for host in hosts:
            if host.state is HostState.SILENT and host.name in given_up:
                self._hosts[host.name] = replace(host, heard_s=now_s - self._settings.timeout_s, since_s=now_s)
                self._hosts.move_to_end(host.name, last=False)
                continue
            state = HostState.JOINING if host.state in (HostState.READY, HostState.SILENT) else host.state
            # The clock may have begun anew: no quarantine becomes longer than it was.
            free_at_s = min(host.free_at_s, now_s + self._quarantine_s(host.falls))
            heard_s = now_s + self._settings.period_s
            self._hosts[host.name] = replace(host, state=state, heard_s=heard_s, since_s=now_s, free_at_s=free_at_s)
            if state is HostState.CORDONED:
                self._cordoned.add(host.name)

    def heard(self, name: str, incarnation: str, now_s: float, *, address: str = "", block: str = "") -> None:
        """A host has said something. One that was silent, or whose monitor is new, is to be checked again."""
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
        """Its monitor was told to end, by somebody who had a reason. It has no ranks, and is a host as any other when
        another monitor of it comes."""
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
        """One that was silent for a while, and that nobody has replaced meanwhile, goes on as before."""
        before = self._silent.pop(host.name, None)
        if before is None:
            return self._fallen(host, "it was silent", now_s)
        falls = self._falls(host, now_s)
        if before is HostState.QUARANTINED:  # silence does not make it shorter
            free_at_s = max(host.free_at_s, now_s)
            return replace(self._changed(host, before, host.reason, now_s), falls=falls, free_at_s=free_at_s)
        state = before if incarnation == host.incarnation else HostState.JOINING
        return replace(self._changed(host, state, "", now_s), falls=falls, free_at_s=now_s)

    def checked(self, name: str, problem: str, now_s: float) -> None:
        """A check of a host has ended. Args: problem: what is wrong with it; "": nothing."""
        host = self._hosts.get(name)
        if host is None or host.state in (HostState.SILENT, HostState.CORDONED):
            return
        if problem:
            self.quarantine(name, problem, now_s)
        elif host.state is HostState.JOINING or (host.state is HostState.QUARANTINED and now_s >= host.free_at_s):
            self._hosts[name] = self._changed(host, HostState.READY, "", now_s)

    def to_check(self, now_s: float) -> list[str]:
        """Hosts that a check would make ready."""
        return [
            host.name
            for host in self._hosts.values()
            if host.state is HostState.JOINING or (host.state is HostState.QUARANTINED and now_s >= host.free_at_s)
        ]

    def quarantine(self, name: str, reason: str, now_s: float) -> None:
        """The host has no ranks for a while, and not before a check has passed."""
        host = self._hosts.get(name)
        if host is None or host.state in (HostState.SILENT, HostState.CORDONED):
            return  # silent ones fall when they come back
        self._hosts[name] = self._fallen(host, reason, now_s)

    def cordon(self, name: str, reason: str, now_s: float) -> bool:
        """Takes a host out until :meth:`uncordon`. False: there is no such host."""
        host = self._hosts.get(name)
        if host is None:
            return False
        self._silent.pop(name, None)
        self._hosts[name] = self._changed(host, HostState.CORDONED, reason, now_s)
        return True

    def uncordon(self, name: str, now_s: float) -> bool:
        """The host is to be checked, and is free then. False: there is no such host, or it is not cordoned."""
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
        """With one more."""
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
        """Hosts that are silent from now on. To be asked at least once a period."""
        self._forgive_own_absence(now_s)
        late: list[Host] = []
        fell, gone = [], []
        for host in self._hosts.values():
            if now_s - host.heard_s <= self._settings.timeout_s:
                break  # and so are all after it
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
        """Those of the late hosts that are taken for silent now: of the others it is not clear yet whether nobody is
        heard. It is after a period at the latest, in which all hosts report, or all are late."""
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
        """It is one of those whose silence at once is a sign of trouble with the network."""
        if host.state is HostState.SILENT:
            return host.name in self._silent
        return host.state is not HostState.CORDONED

    def _are_many(self, silent: int, counted: int) -> bool:
        return silent >= 2 and silent > self._settings.freeze_fraction * counted

    def long_silent(self, now_s: float) -> list[str]:
        """Hosts that have been silent for so long, and not given up, that they are no sign of anything any more."""
        lasting_s = _LASTING * self._settings.timeout_s
        silent = (self._hosts[name] for name in self._silent)
        return [host.name for host in silent if now_s - host.since_s > lasting_s]

    def give_up(self, name: str) -> None:
        """A silent host that was replaced: it is no sign any more, and is in quarantine when it comes back."""
        self._silent.pop(name, None)

    def forget(self, name: str) -> None:
        """A host that is gone for good, and has no place."""
        if self._hosts.pop(name, None) is not None:
            self._silent.pop(name, None)
            self._mute.discard(name)
            self._cordoned.discard(name)
            if name in self._ready:
                self._ready.discard(name)
                self.ready_version += 1
            self._names_changed.add(name)

    def forgotten(self, now_s: float) -> list[str]:
        """Hosts silent for so long that they may be forgotten."""
        longest_s = self._settings.forget_s
        silent = (host for host in self._hosts.values() if host.state is HostState.SILENT)
        return [host.name for host in silent if now_s - host.heard_s > longest_s]

    def _forgive_own_absence(self, now_s: float) -> None:
        """When this process did not run, nothing could be heard."""
        away_s = now_s - self._looked_s - self._settings.period_s
        self._looked_s = now_s
        if away_s <= self._settings.timeout_s / 4:
            return
        logger.warning("the supervisor was away for %.1f s; hosts have that much longer to report", away_s)
        for name, host in self._hosts.items():
            self._hosts[name] = replace(host, heard_s=min(now_s, host.heard_s + away_s))

    def _freeze_or_thaw(self, now_s: float) -> None:
        if not self._frozen and len(self._silent) < 2:
            return
        counted = sum(map(self._counts, self._hosts.values()))
        if self._are_many(len(self._silent), counted):
            self._thaws_at_s = None
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
            if self._thaws_at_s is None:
                self._thaws_at_s = now_s + self._settings.thaw_s
            if now_s >= self._thaws_at_s:
                self._frozen, self._thaws_at_s = False, None
                logger.warning("enough hosts are heard of again; what is still silent is seen to")


def _heard_at(host: Host, now_s: float) -> Host:
    """As :func:`dataclasses.replace`, in a fifth of the time: it is done for each message."""
    made = object.__new__(Host)
    made.__dict__.update(host.__dict__, heard_s=now_s)
    return made
