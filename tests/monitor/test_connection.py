"""The supervisor may be away, be replaced, or say nonsense: the monitor goes on, and forgets nothing that still matters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from resiliency.errors import ConfigError
from resiliency.monitor.connection import ConnectionSettings
from resiliency.monitor.leader_search import words_of
from resiliency.monitor.outbox import Outbox
from resiliency.runtime.messages.launcher import Control
from resiliency.runtime.messages.monitor import (
    MAX_MESSAGE_BYTES,
    Ask,
    Desired,
    Hello,
    Observed,
    Report,
    StepEnded,
    StepKind,
    pack,
)
from resiliency.runtime.messages.observations import Observation, ObservationKind
from tests.monitor.monitored import Host, on_host, place
from tests.ports import free_port
from tests.supervisor.fake_monitors import until


def ask(kind: StepKind, *, plan: int = 1, at: int = 0, timeout_s: float = 5.0, **fields: Any) -> Ask:
    return Ask(plan=plan, at=at, kind=kind, timeout_s=timeout_s, **fields)


def test_what_was_seen_while_the_supervisor_was_away_is_said_afterwards(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        await host.supervisor.stop()
        host.launchers.say(pid, kind="lost", generation=1, rank=1, signal=9)
        await host.supervisor.start()  # at the same address
        (seen,) = await host.supervisor.observed(1)
        assert (seen.kind, seen.rank, seen.generation) == (ObservationKind.WORKER_LOST, 1, 1)
        again = await host.with_place(2)
        assert again["pid"] == pid, "training went on"

    on_host(tmp_path, scenario)


def test_what_was_said_to_a_supervisor_that_died_is_said_to_the_next_until_the_generation_is_over(
    tmp_path: Path,
) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        host.launchers.say(pid, kind="lost", generation=1, rank=1, signal=9)
        await host.supervisor.observed(1)
        for count in (2, 3):
            await host.supervisor.stop()
            await host.supervisor.start()
            if count == 2:
                await host.supervisor.observed(2)
                await host.with_place(2)
        await host.supervisor.until(lambda: sum(isinstance(one, Hello) for one in host.supervisor.heard) == 3)
        since = len(host.supervisor.heard)
        await host.supervisor.report(lambda one: True, since=since)
        await host.supervisor.report(lambda one: True, since=since + 1)
        assert len(host.supervisor.observations) == 2

    on_host(tmp_path, scenario)


@pytest.mark.parametrize(
    "words",
    [
        "garbage",
        '{"type":"Welcome"}',
        json.dumps({"type": "Desired", "term": "x"}),
        pack(Report(number=1)),
        pack(Observed(observations=())),
        '{"type":"Refused","reason":"no such host"}',
        "[" * 10_000,
        json.dumps({"type": "Desired", "term": 1, "command": "rm -rf /"}),
        "x" * (MAX_MESSAGE_BYTES + 1),
    ],
    ids=["text", "half", "type", "report", "observed", "refused", "deep", "unknown field", "long"],
)
def test_nonsense_ends_the_connection_and_nothing_else(tmp_path: Path, words: str) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.with_place(1)
        count = host.supervisor.connections
        await host.supervisor.say(words)
        await host.supervisor.until(lambda: host.supervisor.connections > count)
        await host.with_place(2)
        assert not host.supervisor.observations

    on_host(tmp_path, scenario)


@pytest.mark.parametrize("words", ["garbage", '{"type":"Refused","reason":"no such host"}'], ids=["text", "refused"])
def test_a_first_word_that_is_no_welcome_is_not_obeyed(tmp_path: Path, words: str) -> None:
    async def scenario(host: Host) -> None:
        host.supervisor.first_words = words
        host.supervisor.desired = Desired(term=1, place=place(9))
        host.start_monitor()
        await host.supervisor.until(lambda: host.supervisor.connections >= 2)
        host.supervisor.first_words = None
        host.supervisor.desired = Desired(term=1)
        await host.with_place(2)

    on_host(tmp_path, scenario)


def test_a_supervisor_that_hangs_up_again_and_again_is_tried_for_ever(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.supervisor.refuses = True
        host.start_monitor()
        await host.supervisor.until(lambda: host.supervisor.connections >= 3)
        host.supervisor.refuses = False
        await host.with_place(1)

    on_host(tmp_path, scenario)


def test_a_supervisor_that_was_heard_is_tried_again_within_two_of_its_periods(tmp_path: Path) -> None:
    """The next one, which gives hosts a timeout and a period, is not to take for lost those that only wait to try."""

    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.with_place(1)
        host.supervisor.refuses = True
        count = host.supervisor.connections
        await host.supervisor.say("garbage")
        await asyncio.wait_for(host.supervisor.until(lambda: host.supervisor.connections > count + 8), 8)

    on_host(tmp_path, scenario)


def test_a_partition_that_is_put_in_ends_by_itself(tmp_path: Path) -> None:
    from resiliency.testing.hosts.inject import Fault, Injector, Target

    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.with_place(1)
        before = host.supervisor.connections
        target = Target(state_dir=host.settings.state_dir, host="host-a")
        assert sorted(await asyncio.to_thread(target.ranks)) == [0, 1]
        said: list[str] = []
        injector = Injector(target, said.append)
        await asyncio.to_thread(injector.inject, Fault(kind="partition", seconds=0.6))
        heard = len(host.supervisor.heard)
        await asyncio.sleep(0.3)
        assert len(host.supervisor.heard) - heard <= 1 and host.supervisor.connections == before
        await host.supervisor.until(lambda: host.supervisor.connections > before)
        with pytest.raises(Exception, match="no fault of a monitor"):
            await asyncio.to_thread(target.ask, Control(action="explode"))

    on_host(tmp_path, scenario)


# ---- asks


def test_a_check_is_answered_when_the_launcher_is_warm(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.supervisor.want(asks=(ask(StepKind.VERIFY, plan=0),))
        await host.supervisor.until(lambda: host.supervisor.answers)
        assert host.supervisor.answers[0] == StepEnded(plan=0, at=0, problem="")
        await host.supervisor.want()
        await host.supervisor.report(lambda one: True, since=len(host.supervisor.heard))
        await host.supervisor.want(asks=(ask(StepKind.VERIFY, plan=0),))  # made anew, not from memory
        await host.supervisor.until(lambda: len(host.supervisor.answers) == 2)

    on_host(tmp_path, scenario)


def test_a_check_without_a_launcher_is_answered_in_time_with_a_problem(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor(command=("/bin/sleep", "60"))
        await host.supervisor.want(asks=(ask(StepKind.VERIFY, timeout_s=1.0),))
        await host.supervisor.until(lambda: host.supervisor.answers)
        assert "not ready" in host.supervisor.answers[0].problem

    on_host(tmp_path, scenario)


def test_a_host_whose_launcher_still_imports_is_not_at_fault_when_it_joins(tmp_path: Path) -> None:
    """Imports from a disk that all hosts read at once may take minutes. A plan that needs the host now is told."""

    async def scenario(host: Host) -> None:
        host.start_monitor(command=("/bin/sleep", "600"))
        await host.supervisor.want(asks=(ask(StepKind.VERIFY, plan=0, timeout_s=0.2),))
        await host.supervisor.want(asks=(ask(StepKind.VERIFY, plan=1, timeout_s=2.0),))
        (answer,) = await host.supervisor.until(lambda: host.supervisor.answers)
        assert answer.plan == 1 and "not ready" in answer.problem

    on_host(tmp_path, scenario)


def test_a_checkpoint_is_what_the_launcher_says_it_is(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        await host.supervisor.want(place=place(1), asks=(ask(StepKind.CHECKPOINT, plan=1),))
        await host.launchers.next("told", kind="save")
        host.launchers.say(pid, kind="saved", generation=1, problem="")
        await host.supervisor.until(lambda: host.supervisor.answers)
        await host.supervisor.want(place=place(1), asks=(ask(StepKind.CHECKPOINT, plan=2),))
        await host.launchers.next("told", kind="save")
        host.launchers.say(pid, kind="saved", generation=1, problem="nothing saves on request")
        await host.supervisor.until(lambda: len(host.supervisor.answers) == 2)
        await host.supervisor.want(place=place(1), asks=(ask(StepKind.CHECKPOINT, plan=3, timeout_s=0.3),))
        await host.supervisor.until(lambda: len(host.supervisor.answers) == 3)
        problems = [one.problem for one in host.supervisor.answers]
        assert problems[:2] == ["", "nothing saves on request"] and "has not said" in problems[2]

    on_host(tmp_path, scenario)


def test_a_signal_reaches_the_ranks_that_run_once_and_no_signal_that_nobody_can_handle(tmp_path: Path) -> None:
    said = tmp_path / "said"

    async def scenario(host: Host) -> None:
        words = f"""if True:
            import signal
            signal.signal(signal.SIGUSR1, lambda *_: open({str(said)!r}, "a").write("it\\n"))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # whatever the test's process has blocked
            open({str(said)!r}, "w").close()
            while True:
                signal.pause()
        """
        rank = await asyncio.create_subprocess_exec(sys.executable, "-S", "-E", "-c", words)
        try:
            host.start_monitor()
            pid = (await host.with_place(1))["pid"]
            host.launchers.say(pid, kind="running", generation=1, ranks={"0": [0, rank.pid]})
            await until(said.exists)
            given = [ask(StepKind.SIGNAL, at=1, signal=int(signal.SIGUSR1)), ask(StepKind.SIGNAL, at=2, signal=9)]
            await until(lambda: rank.pid in host.monitor._seen.running.values())
            await host.supervisor.want(place=place(1), asks=tuple(given))
            await until(lambda: {one.at for one in host.supervisor.answers} == {1, 2} and said.read_text())
            by_step = {one.at: one.problem for one in host.supervisor.answers}
            assert by_step == {1: "", 2: "9 is no signal that a rank can handle"} and rank.returncode is None
            answered = len(host.supervisor.answers)
            await host.supervisor.want(place=place(1), asks=tuple(given))
            await until(lambda: len(host.supervisor.answers) >= answered + 2)
            await asyncio.sleep(0.3)
            assert said.read_text() == "it\n"
        finally:
            rank.kill()
            await rank.wait()

    on_host(tmp_path, scenario)


def test_a_checkpoint_without_ranks_and_a_step_that_is_not_for_hosts_are_problems(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.supervisor.want(asks=(ask(StepKind.CHECKPOINT, at=0), ask(StepKind.HOOK, at=1)))
        await host.supervisor.until(lambda: len(host.supervisor.answers) == 2)
        by_step = {one.at: one.problem for one in host.supervisor.answers}
        assert "no ranks" in by_step[0] and "hook" in by_step[1]

    on_host(tmp_path, scenario)


def test_an_ask_that_was_answered_is_answered_again_and_never_done_twice(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        done = tmp_path / "resets"
        command = f"/bin/sh -c 'echo reset >> {done}'"
        host.start_monitor(reset_command=command)
        wish = ask(StepKind.RESET_DEVICES, plan=9, at=2)
        await host.supervisor.want(asks=(wish,))
        await host.supervisor.until(lambda: len(host.supervisor.answers) == 1)
        await host.supervisor.want(asks=(wish,))
        await host.supervisor.until(lambda: len(host.supervisor.answers) == 2)
        await host.stop_monitor()
        host.start_monitor(reset_command=command)  # it remembers
        await host.supervisor.until(lambda: len(host.supervisor.answers) >= 3)
        assert {(one.plan, one.at, one.problem) for one in host.supervisor.answers} == {(9, 2, "")}
        assert done.read_text() == "reset\n"

    on_host(tmp_path, scenario)


def test_a_reset_that_a_killed_monitor_left_half_done_is_not_done_again(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        begun = tmp_path / "begun"
        os.mkfifo(begun)
        command = f"/bin/sh -c 'echo begun > {begun}; sleep 60'"
        host.start_monitor(reset_command=command)
        await host.supervisor.want(asks=(ask(StepKind.RESET_DEVICES, plan=9, timeout_s=60),))
        assert await asyncio.to_thread(begun.read_text) == "begun\n"
        await host.abandon_monitor()
        host.start_monitor(reset_command=command)
        await host.supervisor.until(lambda: host.supervisor.answers)
        assert "not known" in host.supervisor.answers[0].problem

    on_host(tmp_path, scenario)


def test_a_reset_ends_the_ranks_first_and_its_failure_is_said_in_words(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor(reset_command="/bin/sh -c 'echo no such device >&2; exit 4'")
        told = await host.with_place(1)
        await host.supervisor.want(place=place(1), asks=(ask(StepKind.RESET_DEVICES),))
        await host.supervisor.until(lambda: host.supervisor.answers)
        assert (
            "status 4" in host.supervisor.answers[0].problem and "no such device" in host.supervisor.answers[0].problem
        )
        host.launchers.drain()
        assert any(one["event"] == "ended" and one["pid"] == told["pid"] for one in host.launchers.events)
        await host.launchers.next("connected")  # another one is started

    on_host(tmp_path, scenario)


# ---- what is configured


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"urls": ("ftp://a",)}, "https://HOST:PORT"),
        ({"urls": ("supervisor:9000",)}, "https://HOST:PORT"),
        ({"urls": ("http://10.0.0.1:1",), "token_file": "t"}, "could read the token"),
        ({"urls": ("https://a:1",), "cert_file": "c"}, "both --cert and --key"),
    ],
)
def test_addresses_that_cannot_work_are_refused(fields: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ConnectionSettings(**fields)


def test_a_token_is_read_without_its_line_end_and_a_bad_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    settings = ConnectionSettings(urls=("http://localhost:1",), token_file=str(file))
    file.write_text("secret\n")
    file.chmod(0o600)
    assert settings.token() == "secret"
    for text in ("", "two words", "two\nlines"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="one token"):
            settings.token()


# ---- the outbox alone


def seen(generation: int = 0, rank: int | None = None, device: str = "") -> Observation:
    kind = ObservationKind.WORKER_LOST if generation else ObservationKind.DEVICE_FAULT
    return Observation(
        kind=kind, host="h", workload="job" if generation else "", generation=generation, rank=rank, device=device
    )


def test_a_fault_of_a_device_is_said_until_it_was_received_and_not_again() -> None:
    outbox = Outbox()
    outbox.add(seen(device="a"))
    outbox.connected()
    number, batch = outbox.take()
    assert batch == (seen(device="a"),) and outbox.take() is None
    outbox.connected()  # nobody has received it
    number, batch = outbox.take()
    assert batch
    outbox.received(number)
    outbox.connected()
    assert outbox.take() is None and not outbox.kept


def test_what_is_of_a_generation_is_kept_until_it_is_over_and_once() -> None:
    outbox = Outbox()
    assert outbox.add(seen(1, 0)) and outbox.add(seen(1, 1)) and not outbox.add(seen(1, 0))
    outbox.received(outbox.take()[0])
    outbox.connected()
    assert len(outbox.take()[1]) == 2
    outbox.generation_is("job", 2)
    outbox.connected()
    assert outbox.take() is None


def test_the_outbox_is_bounded_and_forgets_the_oldest() -> None:
    outbox = Outbox()
    for at in range(1500):
        outbox.add(seen(device=str(at)))
    assert len(outbox.kept) == 1000 and outbox.kept[0].device == "500"
    said = 0
    while (batch := outbox.take()) is not None:
        said += len(batch[1])
        assert len(pack(Observed(observations=batch[1]))) < MAX_MESSAGE_BYTES
    assert said == 1000


def test_a_batch_of_the_outbox_fits_into_a_message_whatever_its_letters_are() -> None:
    outbox = Outbox()
    for number in range(100):
        detail = "\N{GRINNING FACE}" * 1000
        outbox.add(Observation(kind=ObservationKind.HOST_UNHEALTHY, host="a", device=str(number), detail=detail))
    count = 0
    while (batch := outbox.take()) is not None:
        assert len(pack(Observed(observations=batch[1]))) <= MAX_MESSAGE_BYTES
        count += len(batch[1])
    assert count == 100


def test_a_plan_of_the_same_number_of_another_state_file_is_not_answered_from_memory(tmp_path: Path) -> None:
    """The supervisor's file was lost: it numbers plans from 1 again."""

    async def scenario(host: Host) -> None:
        done = tmp_path / "resets"
        program = tmp_path / "reset"
        program.write_text(f"#!/bin/sh\necho reset >> {done}\n")
        program.chmod(0o700)
        host.start_monitor(reset_command=str(program))
        await host.launchers.next("connected")
        first = Ask(plan=3, at=0, generation=4, kind=StepKind.RESET_DEVICES, timeout_s=10.0)
        for generation, resets in ((4, 1), (4, 1), (9, 2)):
            said = len(host.supervisor.answers)
            await host.supervisor.want(asks=(replace(first, generation=generation),))
            await host.supervisor.until(lambda said=said: len(host.supervisor.answers) > said)
            assert done.read_text().count("reset") == resets

    on_host(tmp_path, scenario)


def test_the_same_problem_has_the_same_words_each_time() -> None:
    port = free_port()

    async def words() -> str:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as caught:
                await session.get(f"https://127.0.0.1:{port}", ssl=ssl.create_default_context())
        return words_of(caught.value)

    first, second = asyncio.run(words()), asyncio.run(words())
    assert first == second, "it would be logged at each try"
    assert str(port) in first
