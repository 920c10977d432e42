"""Watches for memory errors that ECC could not correct, by the driver's counters since it was loaded."""

from __future__ import annotations

import csv
import importlib
import io
import logging
import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from resiliency.monitor.watchdogs.base import Finding, Watchdog
from resiliency.runtime.messages.observations import DeviceClass

__all__ = ["EccWatchdog"]

logger = logging.getLogger(__name__)

_SMI_TIMEOUT_S = 20.0
_QUERY = "pci.bus_id,ecc.errors.uncorrected.volatile.total"
#: Uncorrected errors by device.
Counts = Mapping[str, int]


def ecc_finding(device: str, count: int, text: str) -> Finding:
    return Finding(
        code="ecc",
        device=device,
        device_class=DeviceClass.RESET,
        detail=f"{count} memory errors were not corrected ({text})",
    )


class EccWatchdog(Watchdog):
    """Reports what the counters gain after the first look, again at each look until it was passed on.

    Args:
        source: file with "device count" lines that replaces the driver in tests.
    """

    name = "ecc"
    interval_s = 10.0
    deadline_s = 30.0
    cooldown_s = 60.0

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._read: Callable[[], Counts] | None = None
        self._missing = False
        self._baseline: dict[str, int] | None = None
        self._seen: Counts = {}

    def look(self) -> list[Finding]:
        if self._read is None and not self._missing:
            self._read = _reader(self._source)
            if self._read is None:
                self._missing = True
                logger.info("ECC errors are not watched: there is neither pynvml nor nvidia-smi on this host")
        if self._read is None:
            return []
        self._seen = self._read()
        if self._baseline is None:
            self._baseline = dict(self._seen)
        found = []
        for device, count in self._seen.items():
            before = self._baseline.setdefault(device, 0)
            if count < before:  # the driver or the device was restarted
                self._baseline[device] = 0
                before = 0
            if count > before:
                found.append(ecc_finding(device, count - before, f"{count} since the driver started"))
        return found

    def reported(self, finding: Finding) -> None:
        if self._baseline is not None and finding.device in self._seen:
            self._baseline[finding.device] = self._seen[finding.device]


def _reader(source: str) -> Callable[[], Counts] | None:
    if source:
        return lambda: _from_file(source)
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return lambda: _from_nvml(nvml)
    except Exception as error:  # also pynvml's own kinds: without a driver it raises NVMLError
        logger.debug("NVML cannot be used: %s", error)
    return _from_smi if shutil.which("nvidia-smi") else None


def _from_nvml(nvml: Any) -> Counts:
    counts = {}
    for at in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(at)
        device = nvml.nvmlDeviceGetPciInfo(handle).busId
        device = device.decode() if isinstance(device, bytes) else str(device)
        try:
            counts[short_address(device)] = int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        except nvml.NVMLError_NotSupported:
            continue  # ECC is off, or the device has none
    return counts


def _from_smi() -> Counts:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    rows = csv.reader(io.StringIO(found.stdout), skipinitialspace=True)
    return {short_address(row[0]): int(row[1]) for row in rows if len(row) == 2 and row[1].strip().isdecimal()}


def _from_file(path: str) -> Counts:
    counts = {}
    try:
        with open(path) as file:
            for line in file:
                words = line.split()
                if len(words) == 2 and words[1].isdecimal():
                    counts[short_address(words[0])] = int(words[1])
    except FileNotFoundError:
        return {}
    return counts


def short_address(address: str) -> str:
    """The address as in the kernel's log: "00000000:3B:00.0" becomes "0000:3b:00"."""
    domain, _, rest = address.lower().partition(":")
    if not rest:
        return address.lower()
    return f"{domain[-4:]}:{rest.partition('.')[0]}"
