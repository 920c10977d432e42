"""What each SXID, an error of an NVSwitch, needs. Codes and NVIDIA's recommended actions are from the appendix of its
Fabric Manager user guide about errors of NVSwitches, the form of the lines from its open kernel modules
(``error_nvswitch.h``).

The severity that stands in the line decides; a line that says non-fatal never ends a job that makes steps: when traffic
stalls all the same, the ranks hang, which is noticed.
"""

from __future__ import annotations

import re

from resiliency.monitor.watchdogs.base import Finding
from resiliency.runtime.messages.observations import DeviceClass

__all__ = ["sxid_finding"]

#: Matches "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up", and not the lines with
#: registers that follow it: "20034, Severity 1 Engine instance 28 ..." and "20034, Data {0x...}".
_LINE = re.compile(
    r"\bnvidia-nvswitch\d+: SXid \(PCI:([0-9A-Fa-f:.]+)\): (\d{1,6}), (Fatal|Non-fatal|Correctable)\b,?\s*(.*)"
)

#: "Always Fatal NVSwitch SXid Errors": the fabric of the whole host is lost.
_ALWAYS_FATAL = {10003, 12020, 22003, 22011, *range(23001, 23018)}
_RESTART = "NVIDIA: always fatal to the fabric; restart the host"
_FATAL = "NVIDIA: fatal to the link's GPUs; reset all GPUs and switches"
#: "Non-Fatal NVSwitch SXid Errors" and "Other Notable NVSwitch SXid Errors". The others are single bit errors.
_NOT_FATAL = {
    10001: "NVIDIA: not fatal; a fatal error may follow",
    10002: "NVIDIA: not fatal; a fatal error may follow",
    10004: "NVIDIA: it is too hot; check the cooling",
    10005: "NVIDIA: it was too hot; check the cooling",
    11004: "NVIDIA: traffic stalls; check the partitions of the fabric",
    12028: "NVIDIA: traffic stalls; restart the virtual machine",
    19084: "NVIDIA: mostly beside a fatal error; reset all GPUs and switches",
    20001: "NVIDIA: sent again; no action",
    20012: "NVIDIA: check the mechanical connections of the link, unless its other end was shut down",
    22012: "NVIDIA: check the mechanical connections of the link, unless its other end was shut down",
    22013: "NVIDIA: can be safely ignored",
}
_CORRECTED = "not fatal, mostly corrected by the switch; NVIDIA: no action"


def sxid_finding(line: str) -> Finding | None:
    """The finding of a line of the kernel; None when it is no SXID. The device of one that asks for a reset is "", all
    devices of the host: GPUs are reset together with the switches between them."""
    found = _LINE.search(line)
    if found is None:
        return None
    switch, code, severity, text = found[1].lower(), int(found[2]), found[3], found[4].strip()
    if severity != "Fatal":
        wanted, reason = DeviceClass.IGNORE, _NOT_FATAL.get(code, _CORRECTED)
    elif code in _ALWAYS_FATAL:
        wanted, reason = DeviceClass.SWAP, _RESTART
    else:
        wanted, reason = DeviceClass.RESET, _FATAL
    return Finding(
        code=f"sxid-{code}/{wanted}",
        device="" if wanted is DeviceClass.RESET else switch,
        device_class=wanted,
        detail=f"SXID {code} of NVSwitch {switch}, {severity}: {text or '(no text)'} [{wanted}: {reason}]",
    )
