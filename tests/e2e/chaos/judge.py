"""What follows from the ledger: was everything that was loaded a committed state, bit for bit, and the newest there was?

And nothing that is begun by a job of yesterday is committed.

*Newest* is the committed save that was begun last, by the order of the ledger, whatever numbers the library gives to
steps and attempts. A load must not give an older one than the newest whose commit somebody had noticed before the load
began, unless we spoiled that one before the load was over, or the library deleted it for one that is newer still.

There is one exception. An attempt that did not see the newest save, because we had moved it away, goes on from an older
one, and both have followers then. Of two that descend from one save the one that got further is the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Save:
    """A save, from the lines of the ranks that took part.

    Attributes:
        number: place in the order in which saves were begun.
        state: digest of what all ranks have.
        own: rank -> digest of what that rank has for itself.
        committed: a rank was told so.
        spoiled: damaged or taken away for good by us.
        unsure: something was away while it was being committed, so parts of it may lie where it is not looked for.
        over: a later attempt had been opened before it was begun, so that it must not be committed.
    """

    number: int
    state: str
    own: dict[int, str] = field(default_factory=dict)
    committed: bool = False
    spoiled: bool = False
    unsure: bool = False
    over: bool = False


@dataclass
class _Load:
    """A load in progress.

    Attributes:
        candidates: saves that were known to be committed when it began, and were in their place.
        excused: those of them that we spoiled or moved meanwhile.
    """

    line: dict[str, Any]
    candidates: set[str]
    excused: set[str] = field(default_factory=set)


#: Actions that may take a rank away from the others of its job.
_BLOWS = ("kill a rank", "kill a job", "kill everything", "stop a rank", "end a job")


class Judge:
    """Takes the lines of one folder in order.

    Attributes:
        problems: what was wrong, in words.
        counts: of lines, and of what was judged.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._saves: dict[str, _Save] = {}
        self._loads: dict[str, _Load] = {}
        self._away: dict[str, list[str] | None] = {}
        self._head_damaged = False
        self._newest_attempt = 0
        self._attempts: dict[str, int] = {}  # job -> its attempt
        self._went_on_from: dict[int, str | None] = {}  # attempt -> the save that it loaded
        self._collective: dict[str, list[_Load]] = {}  # job -> what its ranks load at its start, one load of all
        self._blows = 0  # how often processes of a job were killed or stopped
        self._blows_before: dict[str, int] = {}  # job -> how many of them when it was started
        self._readers: dict[str, Callable[[dict[str, Any]], None]] = {
            "action": self._action,
            "started": self._started,
            "opened": self._opened,
            "save": self._save,
            "committed": self._committed,
            "damage": self._damage,
            "gone": self._gone,
            "away": self._moved_away,
            "back": self._moved_back,
            "loading": self._loading,
            "loaded": self._loaded,
            "refused": self._refused,
            "wrong": self._wrong,
        }

    def read(self, line: dict[str, Any]) -> None:
        self._readers.get(line["what"], self._other)(line)

    # -- saves ----------------------------------------------------------------------------------------------------

    def _opened(self, line: dict[str, Any]) -> None:
        if not self._away:  # in a folder made anew attempts are counted from 1
            self._newest_attempt = max(self._newest_attempt, line["attempt"])
        self._attempts[line.get("job", "")] = line["attempt"]
        self.counts["opened"] += 1

    def _save(self, line: dict[str, Any]) -> None:
        new = _Save(len(self._saves), line["state"], unsure=bool(self._away), over=self._is_over(line["key"]))
        save = self._saves.setdefault(line["key"], new)
        if save.state != line["state"]:
            self._problem(line, f"two ranks saved different states as {line['key']}")
        save.own[line["rank"]] = line["own"]
        self.counts["saves"] += 1

    def _is_over(self, key: str) -> bool:
        return _attempt_of(key) < self._newest_attempt

    def _got_further(self, key: str | None, other: str) -> bool:
        """True when ``other`` is of an attempt that went on from a save before ``key`` without seeing it, and has not
        come as far."""
        attempt = _attempt_of(other)
        if key is None or key not in self._saves or attempt not in self._went_on_from:
            return False
        origin = self._went_on_from[attempt]  # None: it began afresh, as where everything was away
        if origin is not None and origin not in self._saves:
            return False
        before = -1 if origin is None else self._saves[origin].number
        return before < self._saves[key].number and _step_of(key) > _step_of(other)

    def _committed(self, line: dict[str, Any]) -> None:
        save = self._saves[line["key"]]
        if save.over and not save.unsure:
            self._problem(line, f"{line['key']} was begun and committed although a later attempt had been opened")
        self.counts["commits"] += not save.committed
        save.committed = True

    # -- what we do to processes ----------------------------------------------------------------------------------

    def _action(self, line: dict[str, Any]) -> None:
        self._blows += line["kind"] in _BLOWS
        self._other(line)

    def _started(self, line: dict[str, Any]) -> None:
        self._blows_before.setdefault(line.get("job", ""), self._blows)
        self._other(line)

    # -- what we do to files --------------------------------------------------------------------------------------

    def _damage(self, line: dict[str, Any]) -> None:
        self._head_damaged |= line.get("head", False)
        self._spoil(line["keys"])

    def _gone(self, line: dict[str, Any]) -> None:
        self._spoil(line["keys"])

    def _spoil(self, keys: list[str]) -> None:
        for key in keys:
            if key in self._saves:
                self._saves[key].spoiled = True
        self._excuse(keys)

    def _moved_away(self, line: dict[str, Any]) -> None:
        keys = line["keys"]  # None: all
        self._away[line["id"]] = keys
        for save in self._saves.values():
            save.unsure |= not save.committed
        for key in keys or []:
            if key in self._saves:  # it had a manifest, whether or not a rank was told so
                self._saves[key].committed = True
        self._excuse(list(self._saves) if keys is None else keys)

    def _moved_back(self, line: dict[str, Any]) -> None:
        del self._away[line["id"]]

    def _excuse(self, keys: list[str]) -> None:
        for load in self._loads.values():
            load.excused.update(keys)

    # -- loads ----------------------------------------------------------------------------------------------------

    def _loading(self, line: dict[str, Any]) -> None:
        known = {key for key, save in self._saves.items() if save.committed}
        if line["scope"] == "newest":
            known |= set(line["seen"]) & self._saves.keys()
        elif line["scope"] == "one":
            known = set()
        usable = {key for key in known if not self._saves[key].spoiled and not self._saves[key].unsure}
        for keys in self._away.values():
            usable = set() if keys is None else usable - set(keys)
        load = self._loads[line["load"]] = _Load(line, usable)
        if line["how"] == "attempt" and "job" in line:
            # What there is is listed once for all ranks, by the first of them that come: what was put back between the
            # first and the last may not have been there.
            loads = self._collective.setdefault(line["job"], [])
            loads.append(load)
            common = set[str].intersection(*(each.candidates for each in loads))
            for each in loads:
                each.candidates = common

    def _loaded(self, line: dict[str, Any]) -> None:
        load = self._loads.pop(line["load"])
        if load.line["how"] == "attempt" and line.get("job", "") in self._attempts:
            self._went_on_from[self._attempts[line.get("job", "")]] = line["key"]
        self.counts["loads"] += 1
        self.counts[f"loads: {load.line['how']}"] += 1
        self._check_bytes(load, line)
        expected = self._expected(load, line)
        garbled = line["key"] is not None and line["key"] not in self._saves  # judged already
        if expected is None or garbled:
            return
        self.counts["loads judged for the newest"] += 1
        number = self._saves[line["key"]].number if line["key"] in self._saves else -1
        if number < self._saves[expected].number and not self._got_further(line["key"], expected):
            self._problem(line, f"{load.line['how']} gave {line['key']}, although {expected} was committed before")

    def _check_bytes(self, load: _Load, line: dict[str, Any]) -> None:
        key, rank = line["key"], line["rank"]
        if key is None:
            return
        if key not in self._saves:
            if line["checked"] or not self._head_damaged:
                self._problem(line, f"{load.line['how']} gave {key}, which nobody saved")
            return
        save = self._saves[key]
        if line["state"] != save.state:
            if line["checked"] or not save.spoiled:
                self._problem(line, f"{load.line['how']} gave other bytes than were saved as {key}")
            return
        if line["own"] is None and (save.spoiled or save.unsure or key in load.excused or not line["checked"]):
            return  # the shard of this rank is damaged or away
        if line["own"] != save.own.get(rank):
            self._problem(line, f"{load.line['how']} gave rank {rank} other bytes of its own than it saved as {key}")

    def _refused(self, line: dict[str, Any]) -> None:
        load = self._loads.pop(line["load"])
        self.counts["refusals"] += 1
        if line["error"].startswith("Timeout: ") and self._blows > self._blows_before.get(
            line.get("job", ""), self._blows
        ):
            return  # another rank of the job is gone, or stopped
        expected = self._expected(load, line)
        if expected is None or (load.line["scope"] == "newest" and expected not in line["still"]):
            return
        if not load.line["falls_back"] and self._damaged_after(expected):
            return  # who asks for one checkpoint gets that one or the name of the damaged file
        self._problem(line, f"{load.line['how']} failed, although {expected} was committed: {line['error']}")

    def _damaged_after(self, key: str) -> bool:
        return any(save.spoiled and save.number > self._saves[key].number for save in self._saves.values())

    def _expected(self, load: _Load, line: dict[str, Any]) -> str | None:
        """The oldest save that the load may give; None when nothing can be demanded."""
        still = line["still"]
        demanded = sorted(load.candidates - load.excused, key=lambda key: self._saves[key].number)
        if not demanded:
            return None
        # What we have taken away may have been the reason for a deletion.
        replacing = [self._saves[key] for key in still if key in self._saves]
        replacing += [save for save in self._saves.values() if save.committed and (save.spoiled or save.unsure)]
        newest_there = max((save.number for save in replacing), default=-1)
        if load.line["scope"] == "newest":  # a name moves on before what it meant is deleted
            while demanded and demanded[-1] not in still and newest_there > self._saves[demanded[-1]].number:
                demanded.pop()
        return demanded[-1] if demanded else None

    # -- the rest -------------------------------------------------------------------------------------------------

    def _wrong(self, line: dict[str, Any]) -> None:
        self._problem(line, line["text"])

    def _other(self, line: dict[str, Any]) -> None:
        self.counts[line["what"]] += 1

    def _problem(self, line: dict[str, Any], text: str) -> None:
        self.problems.append(f"{text} [{line}]")


def _step_of(key: str) -> int:
    return int(key.split("-")[0])


def _attempt_of(key: str) -> int:
    return int(key.split("-a")[1].split("-")[0])
