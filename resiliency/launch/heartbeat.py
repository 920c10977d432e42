"""This process's heartbeat: what it says of its progress, on pages that others read at any time.

``resiliency run`` gets a page of each of its ranks; without it, or beside it, a page is a file in a folder
(``RESILIENCY_HEARTBEAT_DIR``, see :mod:`resiliency.launch.heartbeat_files`). A beat is a few stores into mapped memory:
about a microsecond, no system call, no lock. A process that holds the GIL, or that is stopped, is seen to make none.
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
from resiliency.launch.channel import send
from resiliency.launch.heartbeat_files import HeartbeatFile
from resiliency.launch.heartbeat_page import PAGE_BYTES, Page, PageWriter, Phase, SaveWords, WorkWords, place_word
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

#: The first times between beats, in which caches are filled and kernels are chosen, tell nothing of those after them.
_WARM_UP = 3
#: Makes a rank write the stacks of all its threads to its standard error, also while native code holds the GIL.
STACKS_SIGNAL = signal.SIGRTMIN + 11


class Heartbeat:
    """The pages of this process. Thread: the training thread.

    Args:
        launcher: address of ``resiliency run``; "": there is none.

    Raises:
        OSError: the launcher does not answer.
    """

    def __init__(self, launcher: str) -> None:
        self._pages: list[PageWriter] = []
        self._file: HeartbeatFile | None = None
        self._saves: SaveWords | None = None  # with a launcher
        self._work: WorkWords | None = None  # with a launcher
        if launcher:
            self._connect(launcher)
        self.start_anew()

    def _connect(self, launcher: str) -> None:
        fd = os.memfd_create("resiliency-heartbeat", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            # Not the file that a folder has: whoever may write there could cut it, and end the launcher.
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
        """Writes to a file in a folder, too, from now on; instead of one in another folder.

        Raises:
            ConfigError: the folder is not in memory.
            OSError: it cannot be used.
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
        """What was observed in an attempt before means nothing."""
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
        """The rank has made progress, and will again."""
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
        """Nothing is expected of the rank until it beats again."""
        self._last = 0
        self._shown = time.monotonic_ns()
        self._write(watched=False)

    def enter(self, phase: Phase, step: int | None) -> None:
        """The rank does something else now. While it trains and saves it is watched as before."""
        if step is not None:
            self._step = step
        self._phase = phase
        self._shown = time.monotonic_ns()
        stays = phase in (Phase.TRAINING, Phase.SAVING) and self._last != 0
        if not stays:
            self._last = 0
        self._write(watched=stays)

    def show(self) -> None:
        """A sign of life where none is expected, as of a batch of a validation."""
        self._beats += 1
        self._last = 0
        self._shown = time.monotonic_ns()
        self._write(watched=False)

    def take_wanted_save(self, step: int) -> bool:
        """True once for a step after which the launcher wants a save."""
        if self._saves is None or step == self._taken or self._saves.wanted() != step:
            return False
        self._taken = step
        return True

    def committed(self, step: int) -> None:
        """The newest step of which the save is committed; -1: none."""
        if self._saves is not None:
            self._saves.committed(step)

    def worked(self, own_s: float, steps: int) -> None:
        """Steps have ended that took this rank so many seconds of its own work."""
        if self._work is not None:
            self._own_ns += int(own_s * 1e9)
            self._own_steps += steps
            self._work.write(own_ns=self._own_ns, steps=self._own_steps)

    def _write(self, *, watched: bool) -> None:
        place = place_word(step=self._step, phase=self._phase, attempt=self._attempt, watched=watched)
        longest = self._longest or self._longest_first  # the first ones, as long as nothing better is known
        for page in self._pages:
            page.write(beats=self._beats, last_ns=self._shown, longest_ns=longest, place=place)


#: Of this process, by its id; None where nobody watches.
_own: dict[int, Heartbeat | None] = {}


def _heartbeat() -> Heartbeat | None:
    pid = os.getpid()
    if pid in _own:
        return _own[pid]
    of_parent = any(_own.values())
    _own.clear()
    _own[pid] = None
    if of_parent or _is_loader_worker():
        return None  # its beats say nothing of the rank, and would be taken for the rank's
    launcher, folder = all_variables().get(LAUNCHER_VARIABLE, ""), environment().heartbeat_dir
    if launcher:
        try:
            _own[pid] = Heartbeat(launcher)
        except OSError:
            _own[pid] = None  # no launcher any more
    if folder is not None:
        try:
            publish(folder)
        except (OSError, ConfigError) as error:
            logger.warning("RESILIENCY_HEARTBEAT_DIR=%s: this rank has no heartbeat there: %s", folder, error)
    return _own[pid]


def _is_loader_worker() -> bool:
    """This process loads data for a rank."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def publish(folder: str) -> None:
    """Writes this process's heartbeat to a file in a folder, too. Thread: the training thread. Blocks: no.

    Raises:
        ConfigError: the folder is not on a file system in memory.
        OSError: it cannot be made or written to.
    """
    heartbeat = _heartbeat() or Heartbeat("")
    heartbeat.publish(os.path.abspath(folder))
    _own[os.getpid()] = heartbeat


def is_published() -> bool:
    """True when somebody can read this process's heartbeat."""
    heartbeat = _heartbeat()
    return heartbeat is not None and heartbeat.is_published


def beat(step: int | None = None) -> None:
    """Tells whoever watches that this rank makes progress: call it once a step in a loop of your own.

    With a callback of this library it is called after each batch. From then on a rank of ``resiliency run`` that does
    not call it for long (``--hang-timeout``) is taken for hung. Where nobody watches it does nothing. Thread: the
    training thread; in a worker process of a data loader, and in a fork of a process that beats, it does nothing.
    Costs: about a microsecond; the first time, a connection to the launcher and a file.

    Args:
        step: optimizer steps done; None: as said before.
    """
    heartbeat = _heartbeat()
    if heartbeat is not None:
        heartbeat.beat(step)


def enter(phase: Phase, step: int | None = None) -> None:
    """Says what this rank does from now on. Only a rank that trains or saves is watched. As cheap as a beat."""
    heartbeat = _heartbeat()
    if heartbeat is not None:
        heartbeat.enter(phase, step)


def show() -> None:
    """A sign of life where none is expected. As cheap as a beat."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.show()


def save_is_wanted(step: int) -> bool:
    """True once, when who started this rank wants a save after this many optimizer steps. All ranks are told the same
    step, ahead of it, so that those who ask after each step save the same ones without talking. As cheap as a beat."""
    heartbeat = _own.get(os.getpid())
    return heartbeat is not None and heartbeat.take_wanted_save(step)


def committed(step: int) -> None:
    """Says that the save after this many optimizer steps is committed. As cheap as a beat."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.committed(step)


def worked(own_s: float, steps: int = 1) -> None:
    """Says how long this rank's own work took in the steps that have just ended: what it did before it first waited
    for others. Ranks that train together take equally long for a step, however unequal they are; this tells which of
    them holds up the others. As cheap as a beat.

    Args:
        own_s: seconds, of all these steps.
    """
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.worked(own_s, steps)


def pause() -> None:
    """Tells whoever watches to expect nothing of this rank until it calls :func:`beat` again."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.pause()


def start_anew() -> None:
    """Counts from zero again, in a process that begins another attempt."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.start_anew()
