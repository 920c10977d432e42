"""Every XID has a class and a reason, and every line of the kernel is read once."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from resiliency.supervisor.model import DeviceClass
from resiliency.supervisor.watchdogs import kernel_log
from resiliency.supervisor.watchdogs.kernel_log import FileLog, Journal, Ring, open_kernel_log
from resiliency.supervisor.watchdogs.xid import XidWatchdog, parse_xid
from resiliency.supervisor.watchdogs.xid_codes import XID_CODES, meaning


def test_every_code_of_the_catalogue_is_there_with_a_reason() -> None:
    assert sorted(XID_CODES) == list(range(1, 173))
    for code, known in XID_CODES.items():
        assert known.code == code and known.name and len(known.reason) > 5, code


@pytest.mark.parametrize(
    ("device_class", "codes"),
    [
        (DeviceClass.APPLICATION, [11, 13, 25, 31, 43, 69, 80, 137]),
        (DeviceClass.SOFT, [8, 32, 39, 68, 83, 94, 100, 135]),
        (DeviceClass.RESET, [46, 48, 62, 74, 95, 109, 119, 120, 136, 140, 143, 144, 150, 158, 171, 172]),
        (DeviceClass.SWAP, [54, 64, 79, 110, 167]),
        (DeviceClass.IGNORE, [14, 44, 45, 63, 92, 93, 106, 107, 121, 157]),
    ],
)
def test_codes_that_are_met_often_have_their_class(device_class: DeviceClass, codes: list[int]) -> None:
    assert {code: XID_CODES[code].device_class for code in codes} == dict.fromkeys(codes, device_class)


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", ("0000:3b:00", 79, "pid=1, GPU has fallen off the bus.")),
        ("NVRM: Xid (PCI:0000:3B:00): 79", ("0000:3b:00", 79, "")),
        ("NVRM: Xid (PCI:0000:3b:00): 79,", ("0000:3b:00", 79, "")),
        ("Nov 24 00:00:00 host kernel: [ 12.3] NVRM: Xid (0000:01:00): 13, 0005", ("0000:01:00", 13, "0005")),
        ("NVRM: Xid (PCI:0000:3b:00 GPU-I:02): 94, contained", ("0000:3b:00", 94, "contained")),
        ("NVRM: GPU at PCI:0000:3b:00: GPU-b850f46d", None),
        ("NVRM: Xid", None),
        ("", None),
    ],
)  # fmt: skip
def test_lines(line: str, parsed: tuple[str, int, str] | None) -> None:
    assert parse_xid(line) == parsed


@pytest.mark.parametrize(
    ("text", "device_class"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", DeviceClass.SWAP),
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", DeviceClass.RESET),
        ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", DeviceClass.IGNORE),
        ("GPU recovery action changed from 0x0 (None) to 0x9 (Something New)", DeviceClass.RESET),
        ("", DeviceClass.IGNORE),
    ],
)
def test_154_asks_for_what_it_says(text: str, device_class: DeviceClass) -> None:
    assert meaning(154, text).device_class is device_class


def test_a_code_that_nobody_knows_is_ignored_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "kernel"
    watchdog = XidWatchdog(str(log))
    watchdog.look()
    log.write_text("NVRM: Xid (PCI:0000:3b:00): 999, new\nNVRM: Xid (PCI:0000:3c:00): 999, new\n")
    assert {one.device_class for one in watchdog.look()} == {DeviceClass.IGNORE}
    assert caplog.text.count("XID 999 is not known") == 1
    watchdog.close()


def test_several_devices_in_one_look_are_all_found_the_worst_first(tmp_path: Path) -> None:
    log = tmp_path / "kernel"
    watchdog = XidWatchdog(str(log))
    watchdog.look()
    log.write_text("".join(f"NVRM: Xid (PCI:0000:0{at}:00): {code}, x\n" for at, code in enumerate([13, 45, 79, 95])))
    found = watchdog.look()
    assert [one.device_class for one in found] == [
        DeviceClass.SWAP,
        DeviceClass.RESET,
        DeviceClass.APPLICATION,
        DeviceClass.IGNORE,
    ]
    watchdog.close()


# ---- where lines come from


def record(number: int, text: str) -> bytes:
    return f"6,{number},{number * 1000},-;{text}\n SUBSYSTEM=pci\n".encode()


class FakeRing(Ring):
    """The kernel's ring: the oldest records are overwritten, which a reader is told once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 4) -> None:
        self.records: dict[int, bytes] = {}
        self._size, self._next = size, 0
        monkeypatch.setattr(kernel_log.os, "open", lambda *arguments: -1)
        monkeypatch.setattr(kernel_log.os, "lseek", self._seek)
        super().__init__()
        monkeypatch.undo()
        monkeypatch.setattr(kernel_log.os, "lseek", self._seek)

    def _seek(self, fd: int, offset: int, whence: int) -> int:
        self._next = min(self.records, default=0)
        return 0

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.records[number] = record(number, f"line {number}")
        for number in sorted(self.records)[: -self._size]:
            del self.records[number]

    def _read(self) -> bytes:
        oldest = min(self.records, default=0)
        if self._next < oldest:
            self._next = oldest
            raise OSError(errno.EPIPE, "overwritten")
        if self._next not in self.records:
            raise BlockingIOError
        self._next += 1
        return self.records[self._next - 1]


def test_each_record_of_the_ring_is_read_once_also_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = FakeRing(monkeypatch)
    ring.add(0, 1)
    ring.resume("")
    assert list(ring.lines()) == [], "what was there before is not looked at"
    cursor = ring.cursor()
    ring.add(2, 3)
    ring.resume(cursor)  # as the next process does
    assert list(ring.lines()) == ["line 2", "line 3"] and list(ring.lines()) == []
    ring.add(4)
    assert list(ring.lines()) == ["line 4"]


def test_a_ring_that_was_overwritten_goes_on_with_the_oldest_and_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring = FakeRing(monkeypatch)
    ring.add(0)
    ring.resume("")
    ring.add(*range(1, 11))
    assert list(ring.lines()) == ["line 7", "line 8", "line 9", "line 10"]
    assert "6 lines of the kernel were overwritten" in caplog.text
    caplog.clear()
    assert list(ring.lines()) == [] and not caplog.text


def test_after_a_boot_all_of_the_ring_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = FakeRing(monkeypatch)
    ring.add(0, 1)
    ring.resume("of-another-boot:1000")
    assert list(ring.lines()) == ["line 0", "line 1"]


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's ring cannot be read here")
def test_the_ring_of_this_kernel_can_be_read() -> None:
    log = open_kernel_log()
    assert isinstance(log, Ring)
    log.resume("")
    assert log.cursor() == "" or log.cursor().split(":")[1].isdecimal()
    log.resume("of-another-boot:0")
    assert all(isinstance(line, str) for line in log.lines())
    log.close()


def test_a_file_is_read_once_line_by_line_over_rotation_and_restart(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    log = FileLog(str(path))
    log.resume("")
    assert list(log.lines()) == []
    with path.open("a") as file:
        file.write("one\ntwo\nthr")
    assert list(log.lines()) == ["one", "two"]
    cursor = log.cursor()
    with path.open("a") as file:
        file.write("ee\n")
    assert list(log.lines()) == ["three"]
    other = FileLog(str(path))
    other.resume(cursor)
    assert list(other.lines()) == ["three"]
    with path.open("a") as file:
        file.write("four\n")
    path.rename(tmp_path / "log.1")
    path.write_text("five\n")
    assert list(log.lines()) == ["four", "five"]
    path.write_text("6\n")  # cut, and written anew
    assert list(log.lines()) == ["6"]
    log.close()
    other.close()


def test_a_file_that_comes_later_is_read_from_its_beginning_by_whoever(tmp_path: Path) -> None:
    log = FileLog(str(tmp_path / "log"))
    log.resume("")
    assert list(log.lines()) == []
    cursor = log.cursor()
    (tmp_path / "log").write_text("one\n")
    for each in (log, other := FileLog(str(tmp_path / "log"))):
        if each is other:
            each.resume(cursor)
        assert list(each.lines()) == ["one"]
        each.close()


def test_the_journal_is_asked_for_what_came_behind_its_cursor(tmp_path: Path) -> None:
    program = tmp_path / "journalctl"
    entries = [json.dumps({"__CURSOR": f"c{at}", "MESSAGE": f"line {at}"}) for at in range(3)]
    program.write_text(
        '#!/bin/sh\necho "$@" >> ' + str(tmp_path / "asked") + "\ncat <<'E'\n" + "\n".join(entries) + "\n{half\nE\n"
    )
    program.chmod(0o755)
    journal = Journal(str(program))
    journal.resume("")
    assert journal.cursor() == "c2"
    assert list(journal.lines()) == ["line 0", "line 1", "line 2"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert "--lines=1" in asked[0] and "--after-cursor=c2" in asked[1] and all("--dmesg" in each for each in asked)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        FileLog(str(tmp_path / "fifo")).resume("")
