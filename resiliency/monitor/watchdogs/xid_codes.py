"""What each XID needs. Codes, names and NVIDIA's recommended actions are from its XID catalogue for A100 and newer,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html; the class that follows from them is decided here.

A code that is not in the table is ignored, with a warning: new drivers have new notes, and a fault that matters shows
in its effects (ranks that die or hang), which swap a host that fails again and again. If each unknown code swapped its
host, an update of the driver could empty a cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from resiliency.runtime.messages.observations import DeviceClass

__all__ = ["XID_CODES", "XidCode", "meaning"]


@dataclass(frozen=True, kw_only=True)
class XidCode:
    """One code.

    Attributes:
        reason: why it has this class.
    """

    code: int
    name: str
    device_class: DeviceClass
    reason: str


_I, _A, _S = DeviceClass.IGNORE, DeviceClass.APPLICATION, DeviceClass.SOFT
_R, _W = DeviceClass.RESET, DeviceClass.SWAP
_ENGINE = "an engine raised an exception; NVIDIA: restart the application"
_UNUSED = "NVIDIA: unused since Ampere"
_LINK_XIDS = range(144, 151)
_NVLINK5 = "NVIDIA: decode the line; without a severity in it the worst that it can say, a reset, is taken"

#: Codes that are in use, except families of codes.
_ROWS: list[tuple[int, str, DeviceClass, str]] = [
    (8, "GPU stopped processing", _S, "NVIDIA: restart the application"),
    (11, "invalid or corrupted push buffer", _A, "NVIDIA: restart and check the application"),
    (13, "graphics engine exception", _A, "an illegal instruction or access of a kernel; NVIDIA: restart, check it"),
    (14, "injected error", _I, "put in from user space, for tests"),
    (25, "invalid or illegal push buffer", _A, "NVIDIA: restart and check the application"),
    (31, "memory page fault", _A, "an illegal address; NVIDIA: restart and check the application"),
    (32, "corrupted push buffer (DMA)", _S, "NVIDIA: mostly the quality of PCIe, rarely the application; restart it"),
    (37, "driver firmware error", _I, "NVIDIA: no action"),
    (38, "driver firmware watchdog", _I, "NVIDIA: no action"),
    (43, "GPU stopped processing", _A, "NVIDIA: the application faulted and must end; the GPU is healthy"),
    (44, "fault during a context switch", _I, "NVIDIA: no action"),
    (
        45,
        "preemptive cleanup",
        _I,
        "what follows when a process with a context is killed, also by a launcher: no cause",
    ),
    (46, "GPU timeout", _R, "NVIDIA: reset the GPU"),
    (48, "double bit ECC error", _R, "an uncorrectable memory error; NVIDIA: reset the GPU, which retires the row"),
    (54, "auxiliary power is not connected", _W, "NVIDIA: check the mechanics: somebody must open the host"),
    (60, "video processor exception", _S, _ENGINE),
    (62, "microcontroller halt", _R, "NVIDIA: reset the GPU"),
    (
        63,
        "row remapped or page retired",
        _I,
        "a repair has worked; NVIDIA: no action, it is complete at the next reset",
    ),
    (
        64,
        "row remapping failed",
        _W,
        "the bad memory stays in use: NVIDIA's reset does not mend it, and it comes again",
    ),
    (66, "illegal register access by the driver", _I, "NVIDIA: no action"),
    (67, "illegal access by the driver", _I, "NVIDIA: no action"),
    (68, "NVDEC0 exception", _S, _ENGINE),
    (69, "graphics engine class error", _A, "NVIDIA: restart and check the application"),
    (74, "NVLink error", _R, "NVIDIA: a GPU reset or a reboot is needed; maybe of the other end of the link"),
    (78, "vGPU cannot start", _W, "NVIDIA: update driver or firmware: no rank can use it before"),
    (79, "GPU has fallen off the bus", _W, "it cannot be reached any more; NVIDIA: restart the machine"),
    (80, "corrupted data sent to the GPU", _A, "NVIDIA: restart and check the application"),
    (86, "OFA exception", _S, _ENGINE),
    (92, "many single bit ECC errors", _I, "they are corrected; NVIDIA: no action, it may come to XID 48"),
    (93, "InfoROM wear limit", _I, "NVIDIA: not fatal, no action"),
    (94, "contained memory error", _S, "one process is concerned; NVIDIA: restart it, reset the GPU when convenient"),
    (95, "uncontained memory error", _R, "NVIDIA: the GPU must be reset before anything runs on it"),
    (106, "SMBPBI test message", _I, "a test"),
    (107, "SMBPBI test message, silent", _I, "a test"),
    (108, "NVLink remote translation error", _I, "NVIDIA: no action"),
    (109, "context switch timeout", _R, "NVIDIA: reset the GPU"),
    (110, "security fault", _W, "NVIDIA: rare without a hardware failure; cold reset of the machine"),
    (119, "GSP does not answer", _R, "NVIDIA: reset the GPU, then the machine"),
    (120, "GSP error", _R, "NVIDIA: reset the GPU, then the machine"),
    (121, "C2C link error", _I, "corrected, no effect; NVIDIA: reset at the next service"),
    (136, "NVLink training failed", _R, "NVIDIA: reset the GPU"),
    (137, "NVLink privilege error", _A, "an illegal access of a peer's memory; NVIDIA: mostly the application"),
    (139, "OFA1 exception", _S, _ENGINE),
    (140, "ECC error that was not recovered", _R, "the row could not be marked for remapping; NVIDIA: reset the GPU"),
    (141, "CUDA fast path error", _I, "NVIDIA: no action"),
    (142, "NVENC3 exception", _S, "as of the other engines"),
    (143, "GPU initialization error", _R, "NVIDIA: reset the GPU"),
    (151, "key rotation error", _W, "NVIDIA: restart the virtual machine"),
    (152, "DLA SMMU error", _I, "NVIDIA: no action"),
    (153, "DLA timeout", _I, "NVIDIA: no action"),
    (154, "recovery action changed", _I, "its text says what the XIDs before it ask for, and is what decides"),
    (155, "NVLink is down on purpose", _R, "NVIDIA: reset the GPU"),
    (156, "resource retired", _R, "NVIDIA: reset the GPU, which completes it"),
    (157, "resource retirement failed", _I, "no repair is left; NVIDIA: workloads may run, it may come again"),
    (158, "GPU fatal timeout", _R, "NVIDIA: reset the GPU"),
    (159, "CHI non-data error", _S, "NVIDIA: check the driver of unified memory; mostly the echo of another error"),
    (160, "channel retired", _I, "a repair has worked; NVIDIA: no action"),
    (161, "channel retirement failed", _I, "NVIDIA: no action"),
    (162, "power smoothing is on again", _I, "a note"),
    (163, "power smoothing is off", _I, "NVIDIA: no reset is required"),
    (164, "power smoothing wears out", _I, "a note, for whoever plans replacements"),
    (165, "power smoothing is worn out", _I, "a note, for whoever plans replacements"),
    (166, "NVLink traffic before encryption", _R, "confidential computing: the links must be set up again"),
    (167, "PCIe fatal timeout", _W, "NVIDIA names no action; a device that PCIe does not reach is as XID 79"),
    (168, "less memory than there was", _W, "errors in protected memory; the machine must be started again"),
    (169, "SEC2 microcontroller halt", _R, "as XID 62"),
    (170, "NVLink interrupt in confidential mode", _R, "as XID 166"),
    (171, "uncorrectable DRAM error", _R, "says of an XID 48 where it was"),
    (172, "uncorrectable SRAM error", _R, "says of an XID 48 where it was"),
]
_FAMILIES: list[tuple[dict[int, str], DeviceClass, str]] = [
    (
        {code: f"copy engine {at} exception" for at, code in enumerate([39, 40, 41, 70, 71, 72, 75, 76, 77, 85])},
        _S,
        _ENGINE,
    ),
    ({code: f"copy engine {code - 116} exception" for code in range(126, 136)}, _S, _ENGINE),
    ({code: f"NVDEC{at} exception" for at, code in enumerate([83, 84, 88, 89, 96, 97, 98], 1)}, _S, _ENGINE),
    ({code: f"NVJPG{at} exception" for at, code in enumerate([82, 99, 100, 101, 102, 103, 104, 105])}, _S, _ENGINE),
    (
        dict(zip(_LINK_XIDS, ("SAW", "RLW", "TLW", "TREX", "NVLPW_CTRL", "NETIR", "MSE"), strict=True)),
        _R,
        _NVLINK5,
    ),
    (
        {
            code: "unused"
            for code in (
                *(*range(1, 8), 9, 10, 12, *range(15, 25), *range(26, 31), *range(33, 37), 42, 47, *range(49, 54)),
                *(*range(55, 60), 61, 65, 73, 81, 87, 90, 91, *range(111, 119), *range(122, 126), 138),
            )
        },
        _I,
        _UNUSED,
    ),
]


def _table() -> dict[int, XidCode]:
    rows = [*_ROWS]
    for names, device_class, reason in _FAMILIES:
        rows += [(code, name, device_class, reason) for code, name in names.items()]
    table = {code: XidCode(code=code, name=name, device_class=kind, reason=why) for code, name, kind, why in rows}
    assert len(table) == len(rows), "a code is in the table twice"
    return dict(sorted(table.items()))


XID_CODES = _table()

#: Matches the text of XID 154: "GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)".
_ACTION = re.compile(r"\brecovery action changed\b(?:.*\bto\s+0x([0-9a-f]+)\b)?\s*(.*)", re.IGNORECASE)
#: By the number of the action, which keeps its meaning while drivers change its name; from NVML's
#: nvmlDeviceGpuRecoveryAction_t. 5 and 6, the domain of IMEX and the bus, have changed places between releases.
_ACTIONS = {0: _I, 1: _R, 2: _W, 3: _S, 4: _R, 7: _W}

#: Matches the text of XIDs 144 to 150, after the process if there is one, whose name says nothing: "RLW_RXPIPE Nonfatal
#: XC0 i0 Link 13 (0x0409a0c2 0x00000008 ...)". The first register is IntrInfo.
_LINK_ERROR = re.compile(
    r".*\b([A-Z][A-Z0-9_/]+) (Nonfatal|Non-fatal|Link Fatal|Fatal)\b(?:[^(]*\((0x[0-9a-f]+))?", re.IGNORECASE
)
#: Why a link is down, bits 20 to 25 of IntrInfo: the two reasons for which NVIDIA's decode table asks for nothing,
#: although it calls them fatal: software or the user has taken it down, and the host has.
_LINK_DOWN, _DOWN_ON_PURPOSE = ("NETIR_LINK_EVT", "NETIR_LINK_DOWN"), (0x26, 0x28)


def meaning(code: int, text: str = "") -> XidCode:
    """The entry of a code. For XIDs 144 to 150 and 154 the text that the driver wrote after it decides the class."""
    known = XID_CODES.get(code)
    if known is None:
        return XidCode(code=code, name="not known to this version", device_class=_I, reason="see xid_codes.py")
    if code == 154 and (found := _ACTION.search(text)) is not None:
        # What this version does not know, or cannot read, may need more than the remedies that it knows.
        wanted = _ACTIONS.get(int(found[1], 16), _W) if found[1] else _W
        return replace(known, device_class=wanted, reason=f"NVIDIA's driver says: {found[2].strip(' ()') or text}")
    if code in _LINK_XIDS and (found := _LINK_ERROR.search(text)) is not None:
        return replace(known, **_of_link(found[1], found[2], int(found[3] or "0", 16)))
    return known


def _of_link(unit: str, severity: str, info: int) -> dict[str, Any]:
    """Class and reason of an error of NVLink 5, from NVIDIA's table "XID 144-150 Decode"."""
    if severity.lower().startswith("non"):
        return {"device_class": _I, "reason": "NVIDIA: not fatal; where it ends a process, XID 45 or 154 follow"}
    if any(name in unit for name in _LINK_DOWN) and info >> 20 & 0x3F in _DOWN_ON_PURPOSE:
        return {"device_class": _I, "reason": "NVIDIA: the link was taken down by software or the host; no action"}
    return {"device_class": _R, "reason": "NVIDIA: fatal; reset the GPU"}
