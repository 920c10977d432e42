"""What other lines of the kernel's log need: those that cost a job its host.

A line takes the host out only where the kernel says that something is lost for good. What it retries, corrects or
recovers is logged and otherwise ignored: a folder that can no longer be written, and ranks that die or hang, are
noticed by themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from resiliency.monitor.watchdogs.base import Finding
from resiliency.runtime.messages.observations import DeviceClass

__all__ = ["KERNEL_LINES", "KernelLine", "kernel_finding"]

_MOST_TEXT = 400


@dataclass(frozen=True, kw_only=True)
class KernelLine:
    """One kind of line.

    Attributes:
        code: of its findings.
        pattern: that a line of this kind contains; its group "device" is the device, "process" a process that the
            kernel has killed.
        device_class: what it needs.
        reason: what it means, for people.
        source: where the form of the line is from.
    """

    code: str
    pattern: re.Pattern[str]
    device_class: DeviceClass
    reason: str
    source: str


_I, _R, _W = DeviceClass.IGNORE, DeviceClass.RESET, DeviceClass.SWAP
_BDF = r"(?P<device>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])"
#: Disks, not: a loop device (an image that is mounted), a CD drive, a floppy, a disk over the network, memory.
_DISK = r"(?P<device>(?!loop|sr\d|fd\d|nbd|z?ram)[\w-]+)"


def _row(code: str, device_class: DeviceClass, reason: str, source: str, pattern: str) -> KernelLine:
    compiled = re.compile(pattern, re.IGNORECASE | re.DOTALL)
    return KernelLine(code=code, pattern=compiled, device_class=device_class, reason=reason, source=source)


_NVIDIA = "NVIDIA open-gpu-kernel-modules"
_AER = "Linux drivers/pci/pcie/aer.c; before 6.13 Uncorrected, since then Uncorrectable"
_MLX5 = "Linux drivers/net/ethernet/mellanox/mlx5/core/health.c"
#: The first row that a line fits counts.
KERNEL_LINES: tuple[KernelLine, ...] = (
    # The code of XID 79, so that a driver that writes both reports one fault.
    _row(
        "xid-79/swap",
        _W,
        "it cannot be reached any more; restart the machine",
        f"{_NVIDIA}, kernel-open/nvidia/nv.c (at the probe, also without an XID) and osinit.c; NVSentinel #155",
        r"\bNVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?(?P<device>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.\d)?)\b"
        r".{0,200}\bfallen off the bus",
    ),
    _row(
        "xid-79/swap",
        _W,
        "a GPU cannot be reached any more; restart the machine",
        f"{_NVIDIA}, kernel-open/nvidia/nv.c; the last of three lines, where a log splits the message",
        r"\bNVRM: (?:installed in this system has )?fallen off the bus and is not responding",
    ),
    _row(
        "gpu-init",
        _R,
        "the driver cannot use it; as XID 143",
        f"{_NVIDIA}, src/nvidia/arch/nvalloc/unix/src/osinit.c",
        r"\bNVRM: GPU (?P<device>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.\d): RmInitAdapter failed!",
    ),
    _row(
        "uvm",
        _W,
        "the driver of unified memory asks for a restart of the machine",
        f"{_NVIDIA}, src/nvidia/src/kernel/rmapi/nv_gpu_ops.c",
        r"\bNVRM: .*\buvm encountered global fatal error .*\brequiring os reboot",
    ),
    _row(
        "pcie-fatal",
        _W,
        "its link was reset after a fatal error",
        _AER,
        rf"\b{_BDF}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)",
    ),
    _row(
        "pcie-fatal",
        _W,
        "its link was reset after a fatal error",
        _AER,
        rf"\bAER: (?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) error (?:message )?received(?:: | from ){_BDF}",
    ),
    _row(
        "pcie-nonfatal",
        _I,
        "the transfer is lost, and the link works; its driver recovers",
        _AER,
        rf"\b{_BDF}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)",
    ),
    _row(
        "pcie-contained",
        _W,
        "the port has cut off what is below it after an error",
        "Linux drivers/pci/pcie/dpc.c",
        rf"\b{_BDF}: DPC: containment event, status:0x",
    ),
    _row(
        "memory-uncorrected",
        _W,
        "the host's memory has an error that could not be corrected",
        "Linux drivers/edac/edac_mc.c",
        r"\bEDAC (?P<device>MC\d+): (?:\d+ )?UE\b",
    ),
    _row(
        "memory-uncorrected",
        _W,
        "a process was killed because of an error of the host's memory",
        "Linux mm/memory-failure.c",
        r"\bMemory failure: 0x[0-9a-f]+: (?:Killing|Sending SIGBUS to) .*\bdue to hardware memory corruption",
    ),
    _row(
        "network-lost",
        _W,
        "its firmware does not answer, and it did not recover",
        f"{_MLX5}; NVSentinel's nicdriver patterns",
        rf"\bmlx5_core {_BDF}: .*(?:device's health compromised|\bhealth recovery failed"
        r"|\bhealth recovery flow aborted|\bunrecoverable hardware error)",
    ),
    _row(
        "filesystem-lost",
        _W,
        "the file system can no longer be written",
        "Linux fs/ext4/super.c, fs/f2fs/super.c, fs/ext2/super.c",
        rf"\b(?:EXT[234]|F2FS)-fs \({_DISK}\): Remounting filesystem read-only",
    ),
    _row(
        "filesystem-lost",
        _W,
        "the file system was shut down",
        "Linux fs/xfs/xfs_fsops.c; before 5.17 xfs_do_force_shutdown and the line that follows",
        rf"\bXFS \({_DISK}\): (?:Filesystem has been shut down|.*\bShutting down filesystem)",
    ),
    _row(
        "filesystem-lost",
        _W,
        "the file system can no longer be written",
        "Linux fs/btrfs/messages.c",
        rf"\bBTRFS \w+ \(device {_DISK}[^)]*\): forced readonly",
    ),
    _row(
        "disk-lost",
        _W,
        "the disk is gone",
        "Linux drivers/nvme/host/pci.c; before 6.4 it was removed",
        r"\bnvme (?P<device>nvme\d+): (?:Disabling device after reset failure|Removing after probe failure)",
    ),
    _row(
        "disk-lost",
        _W,
        "the disk is gone",
        "Linux drivers/scsi/scsi_error.c, scsi_lib.c",
        r"\bsd (?P<device>\d+:\d+:\d+:\d+): .*(?:Device offlined|rejecting I/O to offline device)",
    ),
    _row(
        "disk-lost",
        _W,
        "the array has lost a disk that it cannot go on without",
        "Linux drivers/md/raid0.c",
        r"\bmd/raid0:?(?P<device>md\w+): Disk failure on .*failing array",
    ),
    _row(
        "disk-error",
        _I,
        "one access; an array or another path may have it, and a folder that is watched is tried",
        "Linux block/blk-core.c",
        rf"\b(?:critical \w+ error|I/O error), dev {_DISK}, sector \d+",
    ),
    _row(
        "oom-kill",
        _I,
        "the kernel had no memory left, and chose it",
        "Linux mm/oom_kill.c",
        r"\bKilled process (?P<process>\d+),? .*\(",
    ),
)


def kernel_finding(line: str) -> Finding | None:
    """The finding of a line; None when it is of no kind that is known."""
    for row in KERNEL_LINES:
        if (found := row.pattern.search(line)) is None:
            continue
        groups, text = found.groupdict(), " ".join(line.split())[:_MOST_TEXT]
        process = int(groups.get("process", 0))
        return Finding(
            code=f"{row.code}/{process}" if process else row.code,
            device=_address(groups.get("device", "")),
            device_class=row.device_class,
            detail=f"{text} [{row.device_class}: {row.reason}]",
            killed=process,
        )
    return None


def _address(device: str) -> str:
    """A PCI address without its function 0, as in lines with an XID."""
    return device.lower().removesuffix(".0")
