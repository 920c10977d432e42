"""What is seen of hosts, ranks and devices, as monitors report it and the supervisor counts it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["DeviceClass", "Observation", "ObservationKind"]


class ObservationKind(str, Enum):
    WORKER_LOST = "worker_lost"
    WORKER_HUNG = "worker_hung"
    STRAGGLER = "straggler"
    HOST_SILENT = "host_silent"
    HOST_LOST = "host_lost"  # a cordoned host has fallen silent
    HOST_UNHEALTHY = "host_unhealthy"  # its monitor reports a problem, or it has failed a step of a plan
    DEVICE_FAULT = "device_fault"
    DRAIN = "drain"  # an operator, or the host itself, wants the host empty
    CAPACITY = "capacity"  # hosts are ready that the job could use
    NO_PROGRESS = "no_progress"  # a step of a plan has failed, or ranks have lost a peer that no host reports

    def __str__(self) -> str:
        return self.value


class DeviceClass(str, Enum):
    """What is needed to mend a fault of a device."""

    IGNORE = "ignore"
    APPLICATION = "application"  # the program caused it; the device is well
    SOFT = "soft"  # a restart of the ranks mends it
    RESET = "reset"  # a reset of the device mends it
    SWAP = "swap"  # the host must be swapped

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One thing that was seen.

    Attributes:
        workload: "": it concerns the host alone.
        generation: in which it was seen; when it is not about ranks, the workload's generation when it was noticed.
        rank: global rank, when it is about one.
        device: PCI address or index, when it is about one.
        device_class: for a DEVICE_FAULT.
        exit_code: of a WORKER_LOST, minus the signal that ended it; None: it is not known.
        detail: for people.
    """

    kind: ObservationKind
    host: str = ""
    workload: str = ""
    generation: int = 0
    rank: int | None = None
    device: str = ""
    device_class: DeviceClass | None = None
    exit_code: int | None = None
    detail: str = ""

    @property
    def takes_host_out(self) -> bool:
        """Whether the host can have no ranks any more."""
        if self.kind is ObservationKind.DEVICE_FAULT:
            return self.device_class is DeviceClass.SWAP
        return self.kind in _OUT

    @property
    def is_planned(self) -> bool:
        """Whether nothing is broken: the job trains, and may be asked for a checkpoint first."""
        return self.kind in (ObservationKind.DRAIN, ObservationKind.CAPACITY, ObservationKind.STRAGGLER)

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two observations of the same thing."""
        return self.kind, self.host, self.workload, self.rank, self.device, self.device_class


_OUT = {
    ObservationKind.HOST_SILENT,
    ObservationKind.HOST_LOST,
    ObservationKind.HOST_UNHEALTHY,
    ObservationKind.DRAIN,
}
