"""Every XID has a class and a reason, and every line of the kernel is read once."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from resiliency.monitor.watchdogs import kernel_log
from resiliency.monitor.watchdogs.kernel_log import FileLog, Journal, Ring, open_kernel_log
from resiliency.monitor.watchdogs.xid import XidWatchdog, parse_xid
from resiliency.monitor.watchdogs.xid_codes import XID_CODES, meaning
from resiliency.runtime.messages.observations import DeviceClass


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
        ("GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", DeviceClass.SWAP),
        ("GPU recovery action changed from 0x2 (OS Reboot) to 0x0 (No Action)", DeviceClass.IGNORE),
        ("pid=7, name=a, GPU recovery action changed from 0x0 (None) to 0x1 (OS Reboot)", DeviceClass.RESET),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", DeviceClass.SOFT),
        ("GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", DeviceClass.RESET),
        ("GPU recovery action changed from 0x0 (None) to 0x7 (System Reboot)", DeviceClass.SWAP),
        ("GPU recovery action changed from 0x0 (None) to 0x9 (Something New)", DeviceClass.SWAP),
        ("GPU recovery action changed from None to Node Reboot Required", DeviceClass.SWAP),
        ("injected fault", DeviceClass.IGNORE),
        ("", DeviceClass.IGNORE),
    ],
)
def test_154_asks_for_what_it_says(text: str, device_class: DeviceClass) -> None:
    assert meaning(154, text).device_class is device_class


#: NVIDIA's table "XID 144-150 Decode": unit, error status by severity; links that are down by reason.
NONFATAL = {
    144: {"SAW_MVB": (0x1, 0x4, 0x8, 0x20)},
    145: {
        "RLW_CTRL": (0x80000000,),
        "RLW_REMAP": (0x1, 0x2, 0x4, 0x8, 0x10, 0x20, 0x100, 0x200, 0x80000000),
        "RLW_RSPCOL": (0x1, 0x80000000),
        "RLW_RXPIPE": (0x1, 0x2, 0x4, 0x8, 0x80000000),
        "RLW_SRC_TRACK": (0x2, 0x4, 0x8, 0x80000000),
        "RLW_TAGSTATE": (0x1, 0x10000, 0x80000000),
    },
    146: {unit: (0x1, 0x2, 0x80000000) for unit in ("TLW_CTRL", "TLW_RX_PIPE0", "TLW_RX", "TLW_TX_PIPE1", "TLW_TX")},
    147: {"TREX": (0x1, 0x80000000)},
    148: {"NVLPW": (0x80000000,), "NVLPW_CTRL": (0x80000000,)},
    149: {"NETIR_BER_EVENT": (0, 1, 2, 3), "NETIR_MFDE_EVENT": (3,)},
}
FATAL = {
    144: {"SAW_MVB": (0x2, 0x10)},
    145: {
        "RLW_REMAP": (0x40, 0x80),
        "RLW_RSPCOL": (0x2,),
        "RLW_SRC_TRACK": (0x1, 0x10, 0x20),
        "RLW_TAGSTATE": (0x2, 0x20000, 0x100000),
    },
    146: {unit: (0x4,) for unit in ("TLW_CTRL", "TLW_RX_PIPE0", "TLW_RX", "TLW_TX_PIPE1", "TLW_TX")},
    149: {"NETIR": (0,), "NETIR_INT": (0,), "NETIR_MFDE_EVENT": (1, 4, 5, 7)},
    150: {"MSE_WATCHDOG": (0,)},
}
DOWN = [0, 1, 2, 4, 10, 15, 16, 17, 18, 21, 22, *range(32, 39), 40, 42, 43]


@pytest.mark.parametrize(
    ("severity", "table", "device_class"),
    [("Nonfatal", NONFATAL, DeviceClass.IGNORE), ("Fatal", FATAL, DeviceClass.RESET)],
)
def test_errors_of_nvlink_5_ask_for_what_the_decode_table_says(
    severity: str, table: dict[int, dict[str, tuple[int, ...]]], device_class: DeviceClass
) -> None:
    for code, units in table.items():
        for unit, statuses in units.items():
            for status in statuses:
                text = f"{unit} {severity} XC0 i0 Link 13 (0x00000021 {status:#010x} 0x00000000)"
                for line in (text, f"pid=876767, name=GEMM Fatal, {text}"):
                    assert meaning(code, line).device_class is device_class, (code, line)


@pytest.mark.parametrize("unit", ["NETIR_LINK_EVT", "NETIR_LINK_DOWN"])
def test_a_link_that_is_down_on_purpose_resets_nothing(unit: str) -> None:
    classes = {
        why: meaning(149, f"{unit} Fatal XC0 i0 Link 08 ({why << 20 | 0x5C6:#010x} 0x00000000)").device_class
        for why in DOWN
    }
    ignored = {why for why, found in classes.items() if found is DeviceClass.IGNORE}
    assert ignored == {0x26, 0x28} and {*classes.values()} == {DeviceClass.IGNORE, DeviceClass.RESET}


def test_an_error_of_nvlink_5_without_a_severity_asks_for_the_worst() -> None:
    assert {meaning(code, text).device_class for code in range(144, 151) for text in ("", "Link 13 (0x1 0x8)")} == {
        DeviceClass.RESET
    }


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


def journal_of(tmp_path: Path, records: list[str]) -> Journal:
    program = tmp_path / "journalctl"
    asked = tmp_path / "asked"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\ncat {tmp_path / "records"}\n')
    program.chmod(0o755)
    (tmp_path / "records").write_text("\n".join([*records, ""]))
    return Journal(str(program))


def test_the_journal_is_asked_for_what_came_behind_its_cursor(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, [json.dumps({"__CURSOR": f"c{at}", "MESSAGE": f"line {at}"}) for at in range(3)])
    journal.resume("")
    assert journal.cursor() == "c2"
    assert list(journal.lines()) == ["line 0", "line 1", "line 2"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert "--lines=1" in asked[0] and "--after-cursor=c2" in asked[1] and all("--dmesg" in each for each in asked)
    assert all("--all" in each for each in asked), "otherwise a long message is null"


def test_each_form_of_a_message_in_the_journal_is_read_and_what_is_none_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = "NVRM: Xid (PCI:0000:3b:00): 95, name=ö".encode()[:-1]
    messages: list[object] = ["text", list(cut), ["one", list(b"two\x01"), "three"], None, ["four", None], [300], 7]
    records = [json.dumps({"__CURSOR": f"c{at}", "MESSAGE": each}) for at, each in enumerate(messages)]
    journal = journal_of(tmp_path, [*records, '{"__CURSOR": "c98", "MESSAGE": "hal', '{"__CURSOR": "c99"}'])
    read = list(journal.lines())
    assert read == ["text", cut.decode(errors="replace"), "one", "two\x01", "three", "four"]
    assert parse_xid(read[1]) is not None and journal.cursor() == "c99"
    (said,) = caplog.messages
    assert said.startswith("5 records of the journal cannot be read") and "c98" in said


def test_a_record_without_a_cursor_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = journal_of(tmp_path, ["{half"])
    assert list(journal.lines()) == list(journal.lines()) == [] and len(caplog.messages) == 1


def test_bytes_of_a_record_that_are_not_printable_are_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = FileLog(str(path))
    log.resume("")
    path.write_bytes(b"3,7,99,-;NVRM: one\\x0aNVRM: two \\x5c \\xc3\\xb6 \\xff\n")
    assert list(log.lines()) == ["NVRM: one\nNVRM: two \\ ö \ufffd"]
    log.close()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        FileLog(str(tmp_path / "fifo")).resume("")
