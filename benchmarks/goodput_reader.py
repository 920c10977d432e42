"""How fast event logs are read, and in how much memory.

``python benchmarks/goodput_reader.py [--events 10000000] [--ranks 8] [--shape rank|one|wrapped] [--keep DIR]`` writes a
log like that of the step observer and the checkpoint engine, reads it in a fresh process and prints a table. ``--shape
rank`` is one file a rank, as our writers make them; ``--shape one`` is a single file with all ranks interleaved line by
line, the slowest case; ``--shape wrapped`` is that file as Cloud Logging exports it: each line is an entry with
``jsonPayload``.
"x json" is the processor time in units of a bare ``json.loads`` of each line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

READ = """
import json, re, sys, time
sys.path.insert(0, sys.argv[1])
from resiliency.goodput.ledger import account
from resiliency.telemetry.reader import LogReader, find_logs
reader = LogReader()
files = find_logs([sys.argv[2]])
began, cpu = time.perf_counter(), time.process_time()
lines = reader.read(files)
read_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
(run,) = reader.collector.runs.values()
began = time.perf_counter()
ledger = account(run)
account_s = time.perf_counter() - began
assert sum(ledger.wall.values()) == ledger.wall_us
# Not ru_maxrss, which includes the peak of the process this one was forked from.
rss = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
# The least that any reader does, for a figure that does not depend on the machine.
cpu = time.process_time()
for file in files:
    with open(file, "rb") as text:
        for line in text:
            json.loads(line)
json_s = time.process_time() - cpu
print(json.dumps({"lines": lines, "read_s": read_s, "cpu_s": cpu_s, "account_s": account_s, "rss_mib": rss,
                  "steps": sum(s.steps.n for s in run.segments), "goodput": ledger.goodput, "json_s": json_s}))
"""


def write(folder: Path, events: int, ranks: int, shape: str) -> int:
    """Writes the log; returns its size in bytes. About 9 of 10 lines are steps, the rest checkpoint events."""
    files = [open(folder / (f"rank-{r:05d}.jsonl" if shape == "rank" else "all.jsonl"), "w") for r in range(ranks)]  # noqa: SIM115
    if shape != "rank":
        files = [files[0]] * ranks
    seconds = 1_760_000_000.0
    written = step = 0
    tail = '"job_name":"bench","event_type":"%s","v":1,"monotonic_s":%.6f,"attempt":0,"rank":%d,"host":"host-%d"'
    while written < events:
        step += 1
        seconds += 0.5
        whole, part = divmod(seconds, 60.0)
        minute = int(whole)
        stamp = _stamp(minute) + f"{part:09.6f}+00:00"
        flag = "true" if step % 20 < 2 else "false"
        for rank, file in enumerate(files):
            head = f'{{"timestamp":"{stamp}",'
            who = tail % ("step", seconds - 1.7e9, rank, rank // 4)
            wait = 0.002 + 0.0001 * rank
            file.write(
                f'{head}{who},"step":{step},"step_s":{0.5 + 0.003 * (step % 7 == 0)},"data_wait_s":{wait:.6f},'
                '"stall_s":0.0,'
                f'"save_in_flight":{flag},"busy_s":{0.2 + 0.001 * rank:.6f}}}\n'
            )
            written += 1
            if step % 20 == 0:
                for kind, fields in (
                    ("checkpoint_started", '"stall_s":0.01,"bytes":1000000'),
                    ("checkpoint_saved", '"tier":"local"'),
                ):
                    who = tail % (kind, seconds - 1.7e9, rank, rank // 4)
                    file.write(f'{head}{who},"step":{step},{fields}}}\n')
                    written += 1
    for file in set(files):
        file.close()
    if shape == "wrapped":
        wrap(folder / "all.jsonl")
    return sum(file.stat().st_size for file in folder.iterdir())


def wrap(path: Path) -> None:
    """Turns each line of a log into an entry of Cloud Logging; the keys of ``jsonPayload`` are sorted."""
    draft = path.with_suffix(".draft")
    with open(path) as lines, open(draft, "w") as file:
        for number, line in enumerate(lines):
            payload = json.loads(line)
            entry = {
                "insertId": f"{number:012x}",
                "jsonPayload": dict(sorted(payload.items())),
                "logName": "projects/a-project/logs/bench-goodput",
                "receiveTimestamp": payload["timestamp"],
                "resource": {"labels": {"project_id": "a-project"}, "type": "global"},
                "severity": "INFO",
                "timestamp": payload["timestamp"],
            }
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")
    draft.replace(path)


_MINUTES: dict[int, str] = {}


def _stamp(minute: int) -> str:
    found = _MINUTES.get(minute)
    if found is None:
        from datetime import datetime, timezone

        _MINUTES.clear()
        found = _MINUTES[minute] = datetime.fromtimestamp(minute * 60, tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--shape", choices=["rank", "one", "wrapped"], default="rank")
    parser.add_argument("--keep", type=Path, help="folder for the log, kept; an existing log there is read again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            write(folder, args.events, args.ranks, args.shape)
        size = sum(file.stat().st_size for file in folder.iterdir())
        result = subprocess.run(
            [sys.executable, "-c", READ, str(ROOT), str(folder)],
            capture_output=True,
            text=True,
            check=True,
            timeout=1800,
        )
    found = json.loads(result.stdout)
    columns = {
        "events": 12,
        "MB": 8,
        "read s": 8,
        "events/s": 10,
        "per CPU s": 10,
        "x json": 7,
        "account s": 10,
        "peak MiB": 9,
        "goodput": 8,
    }
    print(" ".join(f"{name:>{width}}" for name, width in columns.items()))
    print(
        f"{found['lines']:>12,} {size / 1e6:>8,.0f} {found['read_s']:>8.1f} {found['lines'] / found['read_s']:>10,.0f} "
        f"{found['lines'] / found['cpu_s']:>10,.0f} {found['cpu_s'] / found['json_s']:>7.2f} "
        f"{found['account_s']:>10.3f} {found['rss_mib']:>9.0f} {found['goodput']:>8.3f}"
    )


if __name__ == "__main__":
    main()
