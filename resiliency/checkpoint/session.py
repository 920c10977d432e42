"""Opens a session: agrees with all ranks on the attempt and the hosts, and connects to the agent. Collective."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from resiliency.agent.client import AgentClient
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.checkpoint._hosts import host_names, place_of
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.lineage import Lineage
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.rank_messages import AgentReady, RankJoin, SharedFolder, gather
from resiliency.checkpoint.shard_plan import HostPart
from resiliency.errors import AgentError, DirectoryInUse, TierError, UnsupportedFormat
from resiliency.events import BackgroundSink, EventSink, EventWriter, JsonlSink
from resiliency.regular_file import open_regular
from resiliency.runtime.closing import close_when_left
from resiliency.runtime.job_log import tell_launcher
from resiliency.runtime.process_end import tell_end
from resiliency.runtime.standard_streams import occupy_standard_streams
from resiliency.settings import Environment
from resiliency.storage.attempts import largest_of_steps, read_attempt
from resiliency.storage.claims import largest_claim
from resiliency.storage.manifest import EVENTS_DIR, META_DIR
from resiliency.storage.single_files import restore_folders
from resiliency.storage.state_dir import make_state_dir
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers._address import local_path
from resiliency.storage.tiers.local import LocalTier
from resiliency.telemetry.custom_spans import spans_go_to

__all__ = ["Session", "open_session"]

logger = logging.getLogger(__name__)

#: Times that a folder is made which another job removes meanwhile.
_TRIES = 16
#: What is raised then.
_CHANGED_MEANWHILE = (errno.ENOENT, errno.EEXIST)


@dataclass(frozen=True)
class Session:
    """One attempt of a job, as seen by one rank.

    Attributes:
        attempt, token: identity of the attempt.
        lineage: the line of descent that its saves belong to.
        nodes: name of each rank's host, ``[world_size]``.
        node: name of this rank's host.
        local_ranks: ranks of this host.
        together: True when one agent process serves every rank, so that it sees every record itself.
        events: event writer of this rank.
        client: open connection to the agent.
        host_part: what this rank writes of the file that holds a replicated state.
        local_tier: the local tier.
    """

    attempt: int
    token: str
    lineage: Lineage
    nodes: tuple[str, ...]
    node: str
    local_ranks: tuple[int, ...]
    together: bool
    events: EventWriter
    client: AgentClient
    host_part: HostPart
    local_tier: LocalTier

    def abandon(self) -> None:
        """Ends a session that was not opened to the end: the agent must not wait for this rank. Blocks: up to 2 s."""
        self.client.close(timeout_s=2.0)
        self.events.close()


def _make_run_folder(directory: str, run: str, rank: int) -> None:
    """Makes the folder of the run, and tries whether it can be written to.

    Another job may end at this moment, and remove it with all that it has made.
    """
    for attempt in range(_TRIES):
        try:
            folder = os.path.join(make_state_dir(directory), run)
            os.makedirs(folder, exist_ok=True)
            _try_writing(os.path.join(folder, f".write-{rank:05d}"))
            return
        except OSError as error:
            if error.errno not in _CHANGED_MEANWHILE or attempt == _TRIES - 1:
                raise


def _try_writing(path: str) -> None:
    with open(path, "wb", opener=open_regular):
        os.unlink(path)


def _advice(error: OSError | TierError) -> str:
    if isinstance(error, PermissionError):
        return (
            "; give this user write permission there (users who share a folder need a common group and a umask of 002)"
            " or choose another directory"
        )
    return ""


def open_session(
    *,
    local: LocalTierOptions,
    remotes: Sequence[RemoteTierOptions],
    run: str,
    coordinator: Coordinator,
    options: CheckpointerOptions,
    environment: Environment,
    sinks: tuple[EventSink, ...],
) -> Session:
    """Agrees on the attempt and finds or starts the agent.

    Collective: yes. Blocks: up to ``options.agree_timeout`` for each exchange, plus the start of the agent.

    Raises:
        Timeout: a rank is missing.
        DirectoryInUse: another job uses the directory. On all ranks, also those of hosts where none does.
        UnsupportedFormat: the directory or a remote tier holds steps that another version of the format wrote.
        TierError: the local directory cannot be made or read.
    """
    occupy_standard_streams()
    rank, world_size = coordinator.rank, coordinator.world_size
    folder, local_tier = os.path.join(local.directory, META_DIR, run), LocalTier(local.directory, durable=False)
    problem = unsupported = place = ""
    largest = line = 0
    try:
        _make_run_folder(local.directory, run, rank)
        place = place_of(local.directory)
        restore_folders(local_tier, run)
        largest, line = largest_of_steps(local_tier, run)
        largest = max(largest, read_attempt(folder), largest_claim(folder))
    except UnsupportedFormat as error:
        unsupported = str(error)
    except (OSError, TierError) as error:
        # Reported to the other ranks before raising, so that they do not wait for this one.
        problem = f"rank {rank}: {local.directory} cannot be used: {error}{_advice(error)}"
    if rank == 0:
        for remote in remotes:
            store: dict[str, Any] = {"storage_options": remote.storage_options} if remote.storage_options else {}
            tier = open_tier(remote.address, name=remote.name, glance=True, **store)
            try:
                there = largest_of_steps(tier, run)
                largest, line = max(largest, there[0]), max(line, there[1])
            except UnsupportedFormat as error:
                unsupported = unsupported or str(error)
            except TierError as error:
                # A job that is to resume from there raises later, when its step is not found. Other jobs train, with
                # what this host keeps. The steps on that tier are unknown now; this job's saves must be on a larger
                # line when the store is up again, or the login works, so the line is taken from the clock.
                line = max(line, int(time.time()))
                if not error.retryable:
                    logger.error("%s cannot be used: %s. Local checkpoints are written all the same", tier.root, error)
    own_report = RankJoin(
        node=environment.node,
        place=place,
        largest_attempt=largest,
        largest_line=line,
        token=secrets.token_hex(3),
        problem=problem,
        unsupported=unsupported,
    )
    reports = gather(coordinator, "report", own_report, timeout=options.agree_timeout)
    refusals = [report.unsupported for report in reports if report.unsupported]
    if refusals:
        raise UnsupportedFormat("; ".join(dict.fromkeys(refusals)), path=folder)
    problems = [report.problem for report in reports if report.problem]
    if problems:
        raise TierError("; ".join(dict.fromkeys(problems)), retryable=False)
    attempt = max(report.largest_attempt for report in reports) + 1
    lineage = Lineage(max(report.largest_line for report in reports))
    token = reports[0].token
    nodes = host_names([(report.node, report.place) for report in reports])
    node = nodes[rank]
    if rank == 0 and len(set(nodes)) > len({report.node for report in reports}):
        logger.warning(
            "hosts have one name, but neither agents nor folders in common (pods on one machine?): they are taken as"
            " %s. Give each host its own RESILIENCY_NODE",
            ", ".join(dict.fromkeys(nodes)),
        )
    local_ranks = tuple(r for r in range(world_size) if nodes[r] == node)
    shared = _is_shared(
        local,
        folder,
        token,
        node,
        nodes,
        first=rank == local_ranks[0],
        coordinator=coordinator,
        timeout=options.agree_timeout,
    )
    events_dir = environment.events_dir or options.events_dir or _events_dir(folder, remotes, run)
    log = os.path.join(events_dir, f"rank-{rank:05d}.jsonl")
    sink = BackgroundSink(JsonlSink(log))
    close_when_left(sink, BackgroundSink.close)
    events = EventWriter(run=run, attempt=attempt, rank=rank, host=node, sinks=(sink, *sinks))
    tell_launcher(events_dir, run=run, attempt=attempt)
    tell_end(log, events)
    spans_go_to(log, events)
    config = AgentConfig(
        run=run,
        node=node,
        attempt=attempt,
        token=token,
        world_size=world_size,
        local_ranks=local_ranks,
        shared=shared,
        local=TierSpec(address=local.directory, name="local", keep=local.keep, keep_named=local.keep_named),
        durable=local.durable,
        remotes=tuple(
            TierSpec(
                address=r.address, name=r.name, keep=r.keep, keep_named=r.keep_named, storage_options=r.storage_options
            )
            for r in remotes
        ),
        events=os.path.join(events_dir, f"agent-{node}.jsonl"),
        drain_s=options.drain_timeout.total_seconds(),
        only_files=local.only_files and not remotes and len(local_ranks) == world_size,
    )
    client = AgentClient(config, rank, events, embedded=options.agent == "embedded")
    session = Session(
        attempt,
        token,
        lineage,
        nodes,
        node,
        local_ranks,
        len(set(nodes)) == 1,
        events,
        client,
        _host_part(rank, local_ranks, shared),
        local_tier,
    )
    try:
        _connect(session, coordinator, options.agree_timeout)
        return session
    except Exception:  # also when a rank is missing
        session.abandon()
        raise


def _connect(session: Session, coordinator: Coordinator, timeout: timedelta) -> None:
    """Connects to the agent. Collective: yes.

    Raises:
        DirectoryInUse, AgentError: on all ranks when one cannot; alone, a rank raises what it has met.
    """
    client = session.client
    problem, in_use = "", False
    try:
        client.open()
    except Exception as error:  # Boundary: reported to the other ranks before this rank raises.
        problem, failure = f"rank {coordinator.rank}: {error}", error
        in_use = isinstance(error, DirectoryInUse)
    ready = AgentReady(problem=problem, in_use=in_use)
    answers = gather(coordinator, "agent", ready, timeout=timeout)
    problems = [answer.problem for answer in answers if answer.problem]
    if problem and (in_use or not any(answer.in_use for answer in answers)):
        if coordinator.world_size > 1 and not isinstance(failure, AgentError):
            raise AgentError(problem) from failure  # the ranks decide alike what becomes of the fit
        raise failure
    if problems:
        if not problem:
            client.close()
        if any(answer.in_use for answer in answers):
            raise DirectoryInUse("; ".join(problems))
        raise AgentError("; ".join(problems))


def _host_part(rank: int, local_ranks: Sequence[int], shared: bool) -> HostPart:
    """What this rank writes of shard 0. Of hosts that share a folder only rank 0's writes the state; otherwise each
    host writes its own copy."""
    if shared and 0 not in local_ranks:
        return HostPart(writers=0)
    return HostPart(writers=len(local_ranks), index=local_ranks.index(rank))


def _events_dir(folder: str, remotes: Sequence[RemoteTierOptions], run: str) -> str:
    """Folder of the event logs: in the first remote tier that is a folder, else in the run's folder in the local tier.

    On a ramdisk the logs last only as long as the job, because their folder is deleted once everything is uploaded.
    """
    for remote in remotes:
        path = local_path(remote.address)
        if path is not None:
            return os.path.join(path, META_DIR, run, EVENTS_DIR)
    return os.path.join(folder, EVENTS_DIR)


def _is_shared(
    local: LocalTierOptions,
    folder: str,
    token: str,
    node: str,
    nodes: Sequence[str],
    *,
    first: bool,
    coordinator: Coordinator,
    timeout: timedelta,
) -> bool:
    """True when all hosts see the same folder: each host writes a probe file there, and every rank looks for all of
    them."""
    if local.shared is not None or len(set(nodes)) == 1:
        return local.shared is not False
    own_probe = os.path.join(folder, f".probe-{token}-{node}")
    if first:
        with open(own_probe, "w", encoding="ascii"):
            os.utime(own_probe)
    coordinator.all_gather("probe", b"", timeout=timeout)
    seen = all(os.path.exists(os.path.join(folder, f".probe-{token}-{other}")) for other in nodes)
    answers = gather(coordinator, "shared folder", SharedFolder(seen=seen), timeout=timeout)
    if first:
        os.unlink(own_probe)
    return all(answer.seen for answer in answers)
