"""Lines of the kernel's log that cost a job its host are found, with what they need, and lines like them are not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from resiliency.monitor.checks import DEVICES_VARIABLE
from resiliency.monitor.watchdogs import kernel_log, registry
from resiliency.monitor.watchdogs.base import Finding
from resiliency.monitor.watchdogs.kernel_lines import KERNEL_LINES, kernel_finding
from resiliency.monitor.watchdogs.sxid_codes import sxid_finding
from resiliency.monitor.watchdogs.xid import XidWatchdog
from resiliency.runtime.messages.monitor import Ask, StepKind
from resiliency.runtime.messages.observations import DeviceClass, ObservationKind
from tests.monitor.monitored import Host, on_host, place

IGNORE, RESET, SWAP = DeviceClass.IGNORE, DeviceClass.RESET, DeviceClass.SWAP


def found_in(tmp_path: Path, *lines: str) -> list[Finding]:
    log = tmp_path / "kernel"
    watchdog = XidWatchdog(str(log))
    watchdog.look()
    log.write_text("".join(f"{line}\n" for line in lines))
    try:
        return watchdog.look()
    finally:
        watchdog.close()


# ---- switches


@pytest.mark.parametrize(
    ("line", "code", "device", "device_class", "action"),
    [
        ("nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up", 20034, "", RESET, "reset all GPUs and switches"),
        ("[1.5] nvidia-nvswitch3: SXid (PCI:0000:C5:00.0): 24007, Fatal, Link 10 sourcetrack timeout error (First)", 24007, "", RESET, "reset all GPUs and switches"),
        ("nvidia-nvswitch0: SXid (PCI:0000:ca:00.0): 10003, Fatal, unhandled interrupt", 10003, "0000:ca:00.0", SWAP, "restart the host"),
        ("nvidia-nvswitch1: SXid (PCI:0000:c3:00.0): 22003, Fatal, Link 25 Minion Halt", 22003, "0000:c3:00.0", SWAP, "restart the host"),
        ("nvidia-nvswitch1: SXid (PCI:0000:c3:00.0): 23017, Fatal, Link 25 ingress credit parity error", 23017, "0000:c3:00.0", SWAP, "restart the host"),
        ("nvidia-nvswitch1: SXid (PCI:0000:c3:00.0): 99999, Fatal, Link 25 new", 99999, "", RESET, "reset all GPUs and switches"),
        ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)", 12028, "0000:05:00.0", IGNORE, "restart the virtual machine"),
        ("nvidia-nvswitch4: SXid (PCI:0000:c6:00.0): 19084, Non-fatal, Link 29 AN1 Heartbeat Timeout Error (First)", 19084, "0000:c6:00.0", IGNORE, "reset all GPUs"),
        ("nvidia-nvswitch4: SXid (PCI:0000:c6:00.0): 22003, Non-fatal, Link 29 Minion", 22003, "0000:c6:00.0", IGNORE, "no action"),
        ("nvidia-nvswitch4: SXid (PCI:0000:c6:00.0): 11012, Correctable, Link 29 ingress header ECC", 11012, "0000:c6:00.0", IGNORE, "no action"),
    ],
)  # fmt: skip
def test_errors_of_switches(line: str, code: int, device: str, device_class: DeviceClass, action: str) -> None:
    found = sxid_finding(line)
    assert found is not None and (found.device, found.device_class) == (device, device_class)
    assert found.code == f"sxid-{code}/{device_class}" and action in found.detail and f"SXID {code} of" in found.detail


@pytest.mark.parametrize(
    "line",
    [
        "nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 20034, Severity 1 Engine instance 60 Sub-engine instance 00",
        "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Data {0x50610002, 0x10100030, 0x00000000, 0x10100030}",
        "nvidia-nvswitch0: Probing device 0000:c2:00.0, Vendor Id = 0x10de",
        "nvidia-nvswitch0: open (major=510)",
    ],
)
def test_lines_of_switches_that_are_no_error(line: str) -> None:
    assert sxid_finding(line) is None


@pytest.mark.parametrize(("asks", "reset"), [("SXid", ""), ("Xid", "0000:3b:00")])
def test_what_a_reset_itself_writes_is_no_new_fault_and_what_others_write_meanwhile_is(
    tmp_path: Path, asks: str, reset: str
) -> None:
    """A switch has all devices reset, and the reset of a device takes links down, of which the switches write."""
    xid, other = "NVRM: Xid (PCI:0000:3b:00): 74, pid=1", "NVRM: Xid (PCI:0000:5e:00): 95, pid=1"
    fatal = "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): {}, Fatal, Link 28 LTSSM Fault Up"
    written = [fatal.format(20035), *([other] if asks == "Xid" else [])]

    async def scenario(host: Host) -> None:
        kernel, program, resets = (tmp_path / name for name in ("kernel", "reset", "resets"))
        kernel.write_text("")
        says = "".join(f"echo '{line}' >> {kernel}\n" for line in written)
        program.write_text(f'#!/bin/sh\necho "<${DEVICES_VARIABLE}>" >> {resets}\n{says}')
        program.chmod(0o700)
        watchdog = XidWatchdog(str(kernel))
        watchdog.interval_s = 0.02
        host.watchdogs = [watchdog]
        host.start_monitor(reset_command=str(program))
        await host.with_place(1)
        watchdog.interval_s = 60.0  # from the next look on: what the reset writes is looked for
        with kernel.open("a") as file:
            file.write(f"{xid}\n" + (f"{fatal.format(20034)}\n" if asks == "SXid" else ""))
        ask = Ask(plan=1, at=0, kind=StepKind.VERIFY, timeout_s=10)
        await host.supervisor.want(place=place(1), asks=(ask,))
        before = 2 if asks == "SXid" else 1
        await host.supervisor.observed(before)
        await host.supervisor.until(lambda: host.supervisor.answers)
        ask = Ask(plan=2, at=0, kind=StepKind.RESET_DEVICES, timeout_s=10)
        await host.supervisor.want(place=place(1), asks=(ask,))
        await host.supervisor.until(lambda: len(host.supervisor.answers) == 2)
        assert host.supervisor.answers[1].problem == "" and resets.read_text() == f"<{reset}>\n"
        ask = Ask(plan=3, at=0, kind=StepKind.VERIFY, timeout_s=10)
        await host.supervisor.want(place=place(1), asks=(ask,))
        await host.supervisor.until(lambda: len(host.supervisor.answers) == 3)
        assert "SXID" not in host.supervisor.answers[2].problem
        faults = [one for one in host.supervisor.observations if one.kind is ObservationKind.DEVICE_FAULT]
        assert [one.device for one in faults[before:]] == (["0000:5e:00"] if asks == "Xid" else [])

    on_host(tmp_path, scenario)


# ---- other lines


@pytest.mark.parametrize(
    ("line", "code", "device", "device_class"),
    [
        ("NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330)\nNVRM: installed in this system has\nNVRM: fallen off the bus and is not responding to commands.", "xid-79/swap", "0000:3b:00", SWAP),
        ("NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:26b5) installed in this system has fallen off the bus and is not responding to commands.", "xid-79/swap", "0000:b3:00", SWAP),
        ("NVRM: fallen off the bus and is not responding to commands.", "xid-79/swap", "", SWAP),
        ("NVRM: GPU 0000:91:00.0: GPU has fallen off the bus.", "xid-79/swap", "0000:91:00", SWAP),
        ("NVRM: GPU at 0000:03:00.0 has fallen off the bus.", "xid-79/swap", "0000:03:00", SWAP),
        ("NVRM: GPU at PCI:0000:03:00 has fallen off the bus.", "xid-79/swap", "0000:03:00", SWAP),
        ("NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x62:0x40:1784)", "gpu-init", "0000:01:00", RESET),
        ("NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot to recover.", "uvm", "", SWAP),
        ("nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)", "pcie-fatal", "0000:3b:00", SWAP),
        ("mlx5_core 0000:d2:00.1: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible, (Unregistered Agent ID)", "pcie-fatal", "0000:d2:00.1", SWAP),
        ("pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0", "pcie-fatal", "0000:01:00", SWAP),
        ("pcieport 0000:5d:00.0: AER: Multiple Uncorrectable (Fatal) error message received from 0000:5e:00.0", "pcie-fatal", "0000:5e:00", SWAP),
        ("nvme 0000:2a:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)", "pcie-nonfatal", "0000:2a:00", IGNORE),
        ("pcieport 0000:40:01.1: DPC: containment event, status:0x1f01 source:0x0000", "pcie-contained", "0000:40:01.1", SWAP),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x12 offset:0x0 grain:32)", "memory-uncorrected", "mc0", SWAP),
        ("EDAC MC1: UE page 0x0, offset 0x0, grain 4096, row 0, labels :", "memory-uncorrected", "mc1", SWAP),
        ("Memory failure: 0x5e9d12: Killing python:4711 due to hardware memory corruption", "memory-uncorrected", "", SWAP),
        ("mlx5_core 0000:d2:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count", "network-lost", "0000:d2:00", SWAP),
        ("mlx5_core 0000:61:00.1: mlx5_health_try_recover:381:(pid 1): health recovery flow aborted, PCI reads still not working", "network-lost", "0000:61:00.1", SWAP),
        ("mlx5_core 0000:61:00.1: mlx5_health_try_recover:338:(pid 1): health recovery failed", "network-lost", "0000:61:00.1", SWAP),
        ("mlx5_core 0000:61:00.1: print_health_info:424:(pid 0): synd 0x8: unrecoverable hardware error", "network-lost", "0000:61:00.1", SWAP),
        ("EXT4-fs (nvme0n1p2): Remounting filesystem read-only", "filesystem-lost", "nvme0n1p2", SWAP),
        ("XFS (dm-0): Filesystem has been shut down due to log error (0x2).", "filesystem-lost", "dm-0", SWAP),
        ("XFS (sdb1): Corruption of in-memory data (0x8) detected at xfs_trans_cancel+0x10f (fs/xfs/xfs_trans.c:1098).  Shutting down filesystem.", "filesystem-lost", "sdb1", SWAP),
        ("BTRFS info (device sda1 state E): forced readonly", "filesystem-lost", "sda1", SWAP),
        ("nvme nvme4: Disabling device after reset failure: -19", "disk-lost", "nvme4", SWAP),
        ("nvme nvme4: Removing after probe failure status: -19", "disk-lost", "nvme4", SWAP),
        ("sd 2:0:0:0: Device offlined - not ready after error recovery", "disk-lost", "2:0:0:0", SWAP),
        ("sd 2:0:0:0: [sdb] rejecting I/O to offline device", "disk-lost", "2:0:0:0", SWAP),
        ("md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.", "disk-lost", "md0", SWAP),
        ("blk_update_request: critical medium error, dev sdb, sector 1234 op 0x0:(READ) flags 0x0", "disk-error", "sdb", IGNORE),
        ("I/O error, dev nvme0n1, sector 99 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2", "disk-error", "nvme0n1", IGNORE),
    ],
)  # fmt: skip
def test_lines_that_cost_a_job_its_host(line: str, code: str, device: str, device_class: DeviceClass) -> None:
    found = kernel_finding(line)
    assert found is not None
    assert (found.code, found.device, found.device_class) == (code, device, device_class)
    assert " ".join(line.split())[:100] in found.detail


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: GPU at PCI:0000:3b:00: GPU-b850f46d-d5ea-c752-ddf3-c92ddbb7ed33",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15",
        "NVRM: The NVIDIA probe routine was not called for 1 device(s).",
        "NVRM: GPU 0000:91:00.0: GPU serial number is 1653723052734.",
        "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
        "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)",
        "pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0",
        "pcieport 0000:00:01.0: AER: Uncorrected (Non-Fatal) error received: 0000:01:00.0",
        "pcieport 0000:00:01.0: AER: device recovery successful",
        "nvidia 0000:3b:00.0: AER: can't recover (no error_detected callback)",
        "pcieport 0000:40:01.1: DPC: enabled with IRQ 38",
        "EDAC MC0: 1 CE memory scrubbing error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x12)",
        "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0: DEV 0000:3a:0a.0",
        "EDAC sbridge MC0: HANDLING MCE MEMORY ERROR",
        "Memory failure: 0x5e9d12: recovery action for clean LRU page: Recovered",
        "mlx5_core 0000:d2:00.0 eth0: Link down",
        "mlx5_core 0000:d2:00.0 eth0: Link up",
        "mlx5_core 0000:d2:00.0: mlx5_health_try_recover:338:(pid 1): starting health recovery flow",
        "mlx5_core 0000:d2:00.0: mlx5_health_try_recover:351:(pid 1): health recovery succeeded",
        "mlx5_core 0000:d2:00.0: Port module event: module 0, Cable unplugged",
        "mlx5_core 0000:65:00.0 eth0: NETDEV WATCHDOG: CPU: 5: transmit queue 0 timed out 5032 ms",
        "EXT4-fs (sda1): re-mounted 8a2f r/w. Quota mode: none.",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
        "EXT4-fs (loop3): Remounting filesystem read-only",
        "XFS (sda2): Ending clean mount",
        "XFS (sda2): Unmounting Filesystem",
        "BTRFS info (device sda1): using free space tree",
        "nvme nvme4: I/O 22 QID 3 timeout, aborting",
        "nvme nvme4: 8/0/0 default/read/poll queues",
        "md/raid1:md0: Disk failure on sdb1, disabling device.",
        "blk_update_request: I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0",
        "I/O error, dev sr0, sector 0 op 0x0:(READ) flags 0x80700",
        "blk_update_request: I/O error, dev loop2, sector 0",
        "oom_reaper: reaped process 4711 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/a,task_memcg=/a,task=python,pid=4711,uid=0",
    ],
)  # fmt: skip
def test_lines_like_them_that_cost_nothing(line: str) -> None:
    assert kernel_finding(line) is None and sxid_finding(line) is None


def test_each_row_says_why_and_where_its_line_is_from() -> None:
    for row in KERNEL_LINES:
        assert len(row.reason) > 10 and ("Linux " in row.source or "NVIDIA" in row.source), row.code


def test_a_device_that_is_lost_is_one_fault_in_whatever_lines_the_driver_says_it(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        "EDAC MC0: 1 UE memory read error on DIMM#0",
        "NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVRM: GPU 0000:91:00.0: GPU has fallen off the bus.",
        "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up",
    )
    assert len({(one.code, one.device) for one in found}) == 3 and found[-1].device_class is RESET


def test_a_record_of_several_lines_is_one_message(tmp_path: Path) -> None:
    record = "3,9,99,-;NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330)\\x0aNVRM: installed in this system has"
    (found,) = found_in(tmp_path, record + "\\x0aNVRM: fallen off the bus and is not responding to commands.\\x0a")
    assert found.device == "0000:3b:00"


# ---- the OOM killer

KILLED = [
    "Out of memory: Killed process {} (python) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0",
    "Memory cgroup out of memory: Killed process {} (pt_main_thread) total-vm:1kB, anon-rss:1kB",
    "Killed process {} (python) total-vm:1kB, anon-rss:1kB, file-rss:0kB",
    "Out of memory: Killed process {}, UID 48, (python).",
]  # fmt: skip


@pytest.mark.parametrize("line", KILLED)
def test_the_process_that_the_oom_killer_chose(line: str) -> None:
    found = kernel_finding(line.format(4711))
    assert found is not None and (found.killed, found.device_class) == (4711, IGNORE)


@pytest.mark.parametrize("in_container", [False, True])
def test_why_the_kernel_has_killed_a_rank_is_said_and_of_other_processes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_container: bool
) -> None:
    monkeypatch.setattr(registry, "has_kernels_pids", lambda: not in_container)

    async def scenario(host: Host) -> None:
        kernel = tmp_path / "kernel"
        kernel.write_text("")
        watchdog = XidWatchdog(str(kernel))
        watchdog.interval_s = 60.0  # the loss itself has the log read
        host.watchdogs = [watchdog]
        host.start_monitor()
        told = await host.with_place(1)
        pid, rank = told["pid"], told["ranks"]["1"]
        await host.supervisor.until(lambda: watchdog.cursor())
        with kernel.open("a") as file:
            file.write(f"{KILLED[0].format(rank)}\n{KILLED[1].format(1)}\n")
        host.launchers.say(pid, kind="lost", generation=1, rank=0, signal=int(signal.SIGKILL), reason="by hand")
        host.launchers.say(pid, kind="lost", generation=1, rank=1, signal=int(signal.SIGKILL))
        seen = {one.rank: one.detail for one in await host.supervisor.observed(2)}
        assert seen[0] == "signal 9: by hand"
        why = ": the kernel was out of memory: Out of memory: Killed process "
        assert (
            seen[1].startswith("signal 9" + ("" if in_container else why)) and (seen[1] == "signal 9") is in_container
        )
        assert all(one.kind is ObservationKind.WORKER_LOST for one in host.supervisor.observations)
        assert "(pt_main_thread)" not in caplog.text

    on_host(tmp_path, scenario)


@pytest.mark.parametrize("then", ["waits", "ends"])
def test_killed_ranks_are_reported_once_also_while_the_log_is_read(tmp_path: Path, then: str) -> None:
    """Their launcher says meanwhile that it has no ranks any more, or ends."""
    reader, writer = os.pipe()

    class Slow(XidWatchdog):
        def look(self) -> list[Finding]:
            os.read(reader, 1)
            return super().look()

    async def scenario(host: Host) -> None:
        watchdog = Slow(str(tmp_path / "kernel"))
        watchdog.interval_s = 60.0
        host.watchdogs = [watchdog]
        os.write(writer, b"1")
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        await host.supervisor.until(lambda: watchdog.cursor())
        for rank in (0, 1):
            host.launchers.say(pid, kind="lost", generation=1, rank=rank, signal=int(signal.SIGKILL))
        if then == "waits":
            host.launchers.say(pid, kind="waiting", generation=1, warm=True)
            host.launchers.say(pid, kind="lost", generation=1, rank=2, exit_code=1)
            await host.supervisor.observed(1)
        else:
            host.launchers.do(pid, do="exit", status=1)
            await host.launchers.next("started")
        os.write(writer, b"11")
        lost = {0, 1, 2} if then == "waits" else {0, 1}
        assert {one.rank for one in await host.supervisor.observed(len(lost))} == lost

    try:
        on_host(tmp_path, scenario)
    finally:
        os.close(reader)
        os.close(writer)


def test_the_kernels_numbers_are_known_in_its_own_namespace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for link, known in [("pid:[4026531836]", True), ("pid:[4026532745]", False)]:
        monkeypatch.setattr(kernel_log.os, "readlink", lambda path, link=link: link)
        assert kernel_log.has_kernels_pids() is known
