"""The heartbeat of this process: its progress, on memory pages that other processes read at any time.

``resiliency run`` shares a page with each of its ranks. In addition, or without a launcher, the page can be a file in a
folder (``RESILIENCY_HEARTBEAT_DIR``, see :mod:`resiliency.runtime.heartbeat_files`). A beat is a few stores into mapped
memory: about a microsecond, no system call, no lock. While a process holds the GIL in native code, or is stopped,
readers see no beats.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import socket
import sys
import time

from resiliency.errors import ConfigError
from resiliency.runtime.channel import send
from resiliency.runtime.heartbeat_files import HeartbeatFile
from resiliency.runtime.heartbeat_page import PAGE_BYTES, Page, PageWriter, Phase, SaveWords, WorkWords, place_word
from resiliency.settings import LAUNCHER_VARIABLE, all_variables, environment

__all__ = [
    "STACKS_SIGNAL",
    "Heartbeat",
    "Page",
    "Phase",
    "beat",
    "committed",
    "enter",
    "is_published",
    "pause",
    "publish",
    "save_is_wanted",
    "show",
    "worked",
]

logger = logging.getLogger(__name__)

#: The first intervals between beats include filling caches and choosing kernels, and do not predict later ones.
_WARM_UP = 3
#: On this signal a rank writes the stacks of all its threads to its standard error, even while native code holds the
#: GIL.
STACKS_SIGNAL = signal.SIGRTMIN + 11


class Heartbeat:
    """Writes the heartbeat pages of this process. Thread: the training thread.

    Args:
        launcher: address of ``resiliency run``; "": there is none.

    Raises:
        OSError: the launcher does not answer.
    """

    def __init__(self, launcher: str) -> None:
        self._pages: list[PageWriter] = []
        self._file: HeartbeatFile | None = None
        self._saves: SaveWords | None = None  # None without a launcher
        self._work: WorkWords | None = None  # None without a launcher
        if launcher:
            self._connect(launcher)
        self.start_anew()

    def _connect(self, launcher: str) -> None:
        fd = os.memfd_create("resiliency-heartbeat", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            # Not the folder's file: whoever may write to the folder could truncate it, which would kill the launcher.
            page = mmap.mmap(fd, PAGE_BYTES)
            self._pages.append(PageWriter(page))
            self._saves, self._work = SaveWords(page), WorkWords(page)
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._connection.connect("\0" + launcher)
            send(self._connection, {"kind": "heartbeat", "number": 0}, [fd])
        finally:
            os.close(fd)
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)

    def publish(self, folder: str) -> None:
        """From now on also writes to a file in this folder, instead of one in a previous folder.

        Raises:
            ConfigError: the folder is not on a file system in memory.
            OSError: the folder or its file cannot be made.
        """
        if self._file is not None and self._file.folder == folder:
            return
        self._replace_file(HeartbeatFile(folder))
        self._write(watched=False)

    def _replace_file(self, file: HeartbeatFile) -> None:
        if self._file is not None:
            self._pages.remove(self._file)
            self._file.close()
        self._file = file
        self._pages.append(file)

    @property
    def is_published(self) -> bool:
        return bool(self._pages)

    def start_anew(self) -> None:
        """Resets everything observed, for a new attempt: the previous attempt's values do not apply to it."""
        self._beats = self._last = self._longest = self._longest_first = self._shown = 0
        self._step, self._phase, self._attempt = -1, Phase.STARTING, environment().restart
        self._taken = -1
        self._own_ns = self._own_steps = 0
        if self._work is not None:
            self._work.write(own_ns=0, steps=0)
        self.committed(-1)
        if self._file is not None:
            try:
                self._replace_file(HeartbeatFile(self._file.folder))  # its rank may be another one now
            except (OSError, ConfigError) as error:
                logger.warning("heartbeats stay on the page of the attempt before: %s", error)
        self._write(watched=False)

    def beat(self, step: int | None) -> None:
        """Records progress; from now on the rank is watched, and more beats are expected."""
        now = time.monotonic_ns()
        if self._last:
            if self._beats > _WARM_UP:
                self._longest = max(self._longest, now - self._last)
            else:
                self._longest_first = max(self._longest_first, now - self._last)
        self._beats += 1
        self._last = self._shown = now
        self._phase = Phase.TRAINING
        if step is not None:
            self._step = step
        self._write(watched=True)

    def pause(self) -> None:
        """Ends watching: no beat is expected until the next :meth:`beat`."""
        self._last = 0
        self._shown = time.monotonic_ns()
        self._write(watched=False)

    def enter(self, phase: Phase, step: int | None) -> None:
        """Records the phase that begins. A rank that was watched stays watched while it trains or saves, in no other
        phase."""
        if step is not None:
            self._step = step
        self._phase = phase
        self._shown = time.monotonic_ns()
        stays = phase in (Phase.TRAINING, Phase.SAVING) and self._last != 0
        if not stays:
            self._last = 0
        self._write(watched=stays)

    def show(self) -> None:
        """Records a sign of life without starting the watch, as for a validation batch."""
        self._beats += 1
        self._last = 0
        self._shown = time.monotonic_ns()
        self._write(watched=False)

    def take_wanted_save(self, step: int) -> bool:
        """True once for each step after which the launcher wants a save."""
        if self._saves is None or step == self._taken or self._saves.wanted() != step:
            return False
        self._taken = step
        return True

    def committed(self, step: int) -> None:
        """Records the newest optimizer step whose save is committed; -1: none."""
        if self._saves is not None:
            self._saves.committed(step)

    def worked(self, own_s: float, steps: int) -> None:
        """Adds the seconds of own work that the last ``steps`` steps took this rank."""
        if self._work is not None:
            self._own_ns += int(own_s * 1e9)
            self._own_steps += steps
            self._work.write(own_ns=self._own_ns, steps=self._own_steps)

    def _write(self, *, watched: bool) -> None:
        place = place_word(step=self._step, phase=self._phase, attempt=self._attempt, watched=watched)
        longest = self._longest or self._longest_first  # warm-up intervals, until there are better ones
        for page in self._pages:
            page.write(beats=self._beats, last_ns=self._shown, longest_ns=longest, place=place)


#: Process id -> heartbeat of that process; None where nobody watches. A fork finds its parent's entry here.
_own: dict[int, Heartbeat | None] = {}


def _heartbeat() -> Heartbeat | None:
    pid = os.getpid()
    if pid in _own:
        return _own[pid]
    of_parent = any(_own.values())
    _own.clear()
    _own[pid] = None
    if of_parent or _is_loader_worker():
        return None  # a child's beats would be taken for the rank's own
    launcher, folder = all_variables().get(LAUNCHER_VARIABLE, ""), environment().heartbeat_dir
    if launcher:
        try:
            _own[pid] = Heartbeat(launcher)
        except OSError:
            _own[pid] = None  # the launcher is gone
    if folder is not None:
        try:
            publish(folder)
        except (OSError, ConfigError) as error:
            logger.warning("RESILIENCY_HEARTBEAT_DIR=%s: this rank has no heartbeat there: %s", folder, error)
    return _own[pid]


def _is_loader_worker() -> bool:
    """True when this process loads data for a rank."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def publish(folder: str) -> None:
    """Also writes this process's heartbeat to a file in a folder. Thread: the training thread. Blocks: no.

    Raises:
        ConfigError: the folder is not on a file system in memory.
        OSError: the folder or its file cannot be made or written.
    """
    heartbeat = _heartbeat() or Heartbeat("")
    heartbeat.publish(os.path.abspath(folder))
    _own[os.getpid()] = heartbeat


def is_published() -> bool:
    """True when somebody can read this process's heartbeat."""
    heartbeat = _heartbeat()
    return heartbeat is not None and heartbeat.is_published


def beat(step: int | None = None) -> None:
    """Tells watchers that this rank makes progress: call it once a step in a training loop of your own.

    Callbacks of this library call it after each batch. After the first call, a rank of ``resiliency run`` that makes no
    further call for long (``--hang-timeout``) counts as hung. Where nobody watches, in a worker process of a data
    loader, and in a fork of a process that beats, it does nothing. Thread: the training thread. Costs: about a
    microsecond; the first call connects to the launcher and opens a file.

    Args:
        step: optimizer steps done; None: the number of the previous call.
    """
    heartbeat = _heartbeat()
    if heartbeat is not None:
        heartbeat.beat(step)


def enter(phase: Phase, step: int | None = None) -> None:
    """Sets the phase of this rank. Only a rank that trains or saves is watched. Costs as little as :func:`beat`."""
    heartbeat = _heartbeat()
    if heartbeat is not None:
        heartbeat.enter(phase, step)


def show() -> None:
    """Gives a sign of life outside training, where no beats are expected. Costs as little as :func:`beat`."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.show()


def save_is_wanted(step: int) -> bool:
    """True once for each save that the launcher wants after this many optimizer steps. All ranks are told the same step
    before they reach it, so ranks that ask after each step save the same one without communicating. Costs as little as
    :func:`beat`.
    """
    heartbeat = _own.get(os.getpid())
    return heartbeat is not None and heartbeat.take_wanted_save(step)


def committed(step: int) -> None:
    """Records that the save after this many optimizer steps is committed. Costs as little as :func:`beat`."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.committed(step)


def worked(own_s: float, steps: int = 1) -> None:
    """Records how long this rank's own work took in the last steps: until it first waited for other ranks. In ranks
    that train together every step takes equally long, however unequal their work; this number shows which of them holds
    up the others. Costs as little as :func:`beat`.

    Args:
        own_s: seconds, summed over these steps.
    """
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.worked(own_s, steps)


def pause() -> None:
    """Tells watchers to expect no beat of this rank until it calls :func:`beat` again."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.pause()


def start_anew() -> None:
    """Resets the heartbeat, in a process that begins another attempt."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.start_anew()
