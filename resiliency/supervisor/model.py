"""The supervisor's values: hosts, workloads, places, observations, incidents, plans.

Times that end in ``_s`` are seconds of the supervisor's monotonic clock; a host's own clock decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from resiliency.errors import ConfigError
from resiliency.runtime.addresses import NAME
from resiliency.runtime.messages.monitor import StepKind
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.runtime.messages.places import Place
from resiliency.supervisor.running_goodput import RunningGoodput

__all__ = [
    "LAST_RESORTS",
    "Host",
    "HostState",
    "Incident",
    "Outcome",
    "Plan",
    "Remedy",
    "RemedyKind",
    "Step",
    "Workload",
    "WorkloadSpec",
    "WorkloadState",
]


class HostState(str, Enum):
    """Whether a host can be given ranks. Which hosts have ranks is told by :attr:`Workload.places` alone."""

    JOINING = "joining"  # its monitor has connected, and no check has passed yet
    READY = "ready"  # heard from within the timeout, and its last check has passed
    SILENT = "silent"  # not heard from for the timeout
    QUARANTINED = (
        "quarantined"  # it is broken, or keeps falling silent; a check that passes once its quarantine is over frees it
    )
    CORDONED = "cordoned"  # an operator or the cluster has taken it out

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host as the supervisor knows it.

    Attributes:
        name: the one that its monitor has authenticated for.
        incarnation: names the monitor's process; another one means that the monitor was started again.
        heard_s: when the supervisor last heard from it.
        since_s: when its state changed last.
        block: failure domain (rack, NVLink domain) that hosts are placed by; "": unknown.
        reason: why it is not READY.
        free_at_s: for a host in quarantine, when a check may free it.
        falls: how often it has gone silent or broken lately; each time doubles its time in quarantine.
        left: its monitor has reported that it was told to end. The next monitor of the host is not at fault for that.
    """

    name: str
    incarnation: str
    state: HostState
    heard_s: float
    since_s: float = 0.0
    address: str = ""
    block: str = ""
    reason: str = ""
    free_at_s: float = 0.0
    falls: int = 0
    left: bool = False


class WorkloadState(str, Enum):
    WAITING = "waiting"  # until enough hosts are ready
    STARTING = "starting"  # its first places are being given out, until the first training step
    REMEDYING = "remedying"  # a plan is being carried out; its last step waits for the first training step
    RUNNING = "running"
    FROZEN = "frozen"  # so many hosts are silent at once that the supervisor's own connection is suspected
    STOPPED = "stopped"  # ended for good, with a reason
    COMPLETED = "completed"

    def __str__(self) -> str:
        return self.value

    @property
    def has_ended(self) -> bool:
        return self in (WorkloadState.STOPPED, WorkloadState.COMPLETED)


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """What the user wants of one training job.

    Attributes:
        replicas: data-parallel replicas at full size.
        hosts_per_replica: hosts that hold one replica of the model.
        min_replicas: fewest replicas that it can train with.
        ranks_per_host: ranks of each host.
        max_in_job_restarts: how often in a row lost ranks are replaced while the others stay.
        max_workload_restarts: how often in a row all of it is started anew on the same hosts before a host that keeps
            failing is swapped; 0: it is swapped at once.
        scale_up: go back to full size when hosts return.
        swap_stragglers: swap a host for a spare, after a checkpoint, when one of its ranks holds up the others.
        healthy_s: after training for this long, earlier restarts, swaps and faults no longer count.
        dwell_s: hosts must have been ready for this long before the job is restarted to use them.
        correlate_s: an incident collects observations for this long before a remedy is decided.
        start_timeout_s: from a start to the first training step.
        checkpoint_timeout_s: for the checkpoint before a planned restart.
        stop_timeout_s: for ranks to end by themselves before they are killed.
        verify_timeout_s: for the check of a spare.
        wait_timeout_s: for enough hosts to become ready; then the job is stopped.
        reset_timeout_s: for the reset of a device.
    """

    name: str
    replicas: int
    hosts_per_replica: int = 1
    min_replicas: int = 1
    ranks_per_host: int = 1
    max_in_job_restarts: int = 3
    max_workload_restarts: int = 3
    scale_up: bool = True
    swap_stragglers: bool = False
    healthy_s: float = 600.0
    dwell_s: float = 30.0
    correlate_s: float = 0.2
    start_timeout_s: float = 600.0
    checkpoint_timeout_s: float = 60.0
    stop_timeout_s: float = 30.0
    verify_timeout_s: float = 30.0
    wait_timeout_s: float = 3600.0
    reset_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"workload {self.name!r}: pass a name of 1 to 253 letters, digits, '.', '_' and '-' that begins and"
                " ends with a letter or digit"
            )
        for name in ("replicas", "hosts_per_replica", "min_replicas", "ranks_per_host"):
            if getattr(self, name) < 1:
                raise ConfigError(f"workload {self.name!r}: {name}={getattr(self, name)}; pass 1 or more")
        if self.min_replicas > self.replicas:
            raise ConfigError(
                f"workload {self.name!r}: min_replicas={self.min_replicas} is more than replicas={self.replicas}"
            )
        for name in ("max_in_job_restarts", "max_workload_restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"workload {self.name!r}: {name}={getattr(self, name)}; pass 0 or more")
        for name in (each for each in self.__dataclass_fields__ if each.endswith("_s")):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"workload {self.name!r}: {name}={getattr(self, name)}; pass 0 or more seconds")
        for name in ("start_timeout_s", "verify_timeout_s", "reset_timeout_s"):
            if not getattr(self, name):
                raise ConfigError(
                    f"workload {self.name!r}: {name}=0: nothing is done in no time, and each try would fail; pass more"
                )

    def of_size(self, replicas: int, hosts_per_replica: int) -> WorkloadSpec:
        """The same for a job that runs already, with other sizes."""
        least = min(self.min_replicas, replicas)
        return replace(self, replicas=replicas, hosts_per_replica=hosts_per_replica, min_replicas=least)

    @property
    def hosts(self) -> int:
        """Number of hosts at full size."""
        return self.replicas * self.hosts_per_replica

    @property
    def min_hosts(self) -> int:
        return self.min_replicas * self.hosts_per_replica


class RemedyKind(str, Enum):
    NOTHING = "nothing"
    START = "start"  # ready hosts get the places of a job that has not begun
    RESTART_IN_JOB = "restart_in_job"  # lost ranks are replaced, the others stay in their processes
    RESTART_WORKLOAD = "restart_workload"  # every process is new, on the same hosts
    RESET_DEVICES = "reset_devices"
    HOT_SWAP = "hot_swap"  # verified spares take the places of hosts
    SCALE_DOWN = "scale_down"
    SCALE_UP = "scale_up"
    WAIT = "wait"  # for hosts: there are too few to go on
    RENEW_HOSTS = "renew_hosts"  # the cluster makes every host anew
    RENEW_JOB = "renew_job"  # the cluster makes the whole job anew, once
    STOP = "stop"

    def __str__(self) -> str:
        return self.value


#: What is left when neither restarts nor other hosts help, the mildest first. Only what the cluster was found able to.
LAST_RESORTS = (RemedyKind.RENEW_HOSTS, RemedyKind.RENEW_JOB)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """The answer of a policy.

    Attributes:
        out: hosts that lose their places (HOT_SWAP, SCALE_DOWN), or whose devices are reset (RESET_DEVICES).
        reason: for people; for STOP and NOTHING it is the only thing that is logged.
    """

    kind: RemedyKind
    out: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a plan.

    Attributes:
        hosts: that it concerns; empty: all of the workload.
        timeout_s: seconds after which the step has failed.
        required: whether the plan fails when the step fails; otherwise the plan goes on.
        signal: its number, for SIGNAL.
    """

    kind: StepKind
    timeout_s: float
    hosts: tuple[str, ...] = ()
    required: bool = True
    signal: int = 0


class Outcome(str, Enum):
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    OVERTAKEN = "overtaken"  # something that happened meanwhile made it wrong

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A remedy, as steps in order.

    Attributes:
        number: unique for ever.
        generation: the workload's generation once the plan is done; equal to the present one for a plan that restarts
            nothing.
        places: hosts of all node ranks in that generation.
        fresh, replace: see :class:`Place`.
        replace_on: see :class:`Workload`.
        save_step: once a CHECKPOINT has begun: the optimizer step after which ranks save.
        at: index of the present step.
        step_since_s: when that step began.
        failed: hosts because of which the plan has failed.
    """

    number: int
    incident: int
    workload: str
    remedy: Remedy
    generation: int
    places: tuple[str, ...]
    steps: tuple[Step, ...]
    fresh: bool = False
    replace: tuple[int, ...] = ()
    replace_on: tuple[str, ...] = ()
    save_step: int = -1
    at: int = 0
    step_since_s: float = 0.0
    outcome: Outcome = Outcome.ACTIVE
    failed: tuple[str, ...] = ()
    reason: str = ""

    @property
    def step(self) -> Step | None:
        """The present step; None when the plan has ended."""
        active = self.outcome is Outcome.ACTIVE and self.at < len(self.steps)
        return self.steps[self.at] if active else None


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Observations that belong together, and the plans that were tried because of them.

    Attributes:
        number: unique for ever.
        opened_at, closed_at: UTC seconds, for people.
        observations: in the order seen, without duplicates.
        tried: numbers of plans, in order.
        closed_at_s: None while it is open.
        outcome: for people.
        begins_job: it was opened because a job that had no ranks can begin.
    """

    number: int
    workload: str
    opened_at_s: float
    opened_at: float
    observations: tuple[Observation, ...] = ()
    tried: tuple[int, ...] = ()
    closed_at_s: float | None = None
    closed_at: float | None = None
    outcome: str = ""
    begins_job: bool = False

    @property
    def is_open(self) -> bool:
        return self.closed_at_s is None

    @property
    def told(self) -> tuple[Observation, ...]:
        """The observations that people are told of: all but that of hosts for a job that begins."""
        kind = ObservationKind.CAPACITY if self.begins_job else None
        return tuple(one for one in self.observations if one.kind is not kind)

    @property
    def is_start(self) -> bool:
        """Whether it is a start of the job in which nothing has gone wrong. It has a number and plans like an incident,
        but nobody is told of it as one."""
        return self.begins_job and not self.told


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job as the supervisor knows it.

    Attributes:
        generation: grows with each set of places; 0: the job was never started.
        trained: a rank has made a step since the job began.
        places: hosts by node rank; empty: none.
        fresh, replace: for the present places, see :class:`Place`.
        replicas_before: replicas of the generation before.
        since_s: when its state changed last.
        replace_on: the hosts that are told of :attr:`replace`, because they reported that a rank of theirs hangs;
            empty: all hosts.
        in_job_restarts, workload_restarts: how many in a row, without ``healthy_s`` of training in between.
        swaps: how many healthy hosts were swapped in a row because restarts did not help.
        host_faults: faults in a row, by host.
        plan: number of the active plan; None: there is none.
        incident: number of the open incident; None: there is none.
        goodput: the running goodput when this was stored.
        job: what its hosts belong to, as the cluster says; "": it does not say.
        by_hand: it is STOPPED because an operator has stopped it.
        resorts: last resorts that were taken, without ``healthy_s`` of training since.
        stuck: generations whose ranks failed with the same status on every host, after steps, and none of which got
            past ``stuck_step``.
    """

    spec: WorkloadSpec
    state: WorkloadState = WorkloadState.WAITING
    generation: int = 0
    trained: bool = False
    places: tuple[str, ...] = ()
    fresh: bool = False
    replace: tuple[int, ...] = ()
    replace_on: tuple[str, ...] = ()
    replicas_before: int = 0
    since_s: float = 0.0
    in_job_restarts: int = 0
    workload_restarts: int = 0
    swaps: int = 0
    host_faults: Mapping[str, int] = field(default_factory=dict)
    plan: int | None = None
    incident: int | None = None
    reason: str = ""
    goodput: RunningGoodput = RunningGoodput()
    job: str = ""
    by_hand: bool = False
    resorts: tuple[RemedyKind, ...] = ()
    stuck: tuple[int, ...] = ()
    stuck_step: int = -1

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def replicas(self) -> int:
        return len(self.places) // self.spec.hosts_per_replica

    def place_of(self, host: str) -> Place | None:
        """The host's place; None when it has none in this workload."""
        return None if host not in self.places or self.state.has_ended else self.place_at(self.places.index(host))

    def place_at(self, node_rank: int, master: str = "") -> Place:
        """The place of the host with this node rank, with the address of the store where it is known."""
        host = self.places[node_rank]
        return Place(
            workload=self.name,
            generation=self.generation,
            node_rank=node_rank,
            nodes=len(self.places),
            master=master,
            fresh=self.fresh,
            replace=self.replace if host in self.replace_on or not self.replace_on else (),
            replicas=self.replicas,
            replicas_before=self.replicas_before,
        )
