"""Lightning's own tests for checkpoints on our classes: ``python -m tests.conformance FOLDER [--substitute io] ...``.

``FOLDER`` has ``run.sh`` and the tests, which are not part of this project. A test that fails must be listed in
``docs/conformance.md`` with a reason; this fails for one that is not, and names those that pass by now.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "conformance.md"
TITLES = {"callback": "## ModelCheckpoint", "io": "## TieredCheckpointIO"}
#: A file that cannot be collected is an error without a test.
_OUTCOME = re.compile(r"^(?:FAILED|ERROR) tests_pytorch/(\S+?\.py(?:::[^\s\[]+(?:\[[^\]]*\])?)?)", re.MULTILINE)
_TOTALS = re.compile(r"^(?:=+ )?((?:\d+ \w+,? ?)+) in [\d.]+s", re.MULTILINE)


def listed(page: str, substitute: str) -> dict[str, str]:
    """Tests that may fail, with the reasons, from the table under the title of a class. An id without parameters stands
    for all of them."""
    section = page.partition(TITLES[substitute])[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \|$", section, re.MULTILINE)
    return dict(rows)


def failures(output: str) -> list[str]:
    """Ids of the tests that failed, from the output of pytest."""
    return sorted(set(_OUTCOME.findall(output)))


def judge(failed: list[str], known: dict[str, str]) -> tuple[list[str], list[str]]:
    """Tests that failed and are not listed, and listed ones of which none failed."""
    unknown = [test for test in failed if test not in known and test.partition("[")[0] not in known]
    failing = {name for test in failed for name in (test, test.partition("[")[0])}
    return unknown, [test for test in known if test not in failing]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--substitute", choices=TITLES, default="callback")
    parser.add_argument("--namespace", choices=["lightning.pytorch", "pytorch_lightning"], default="lightning.pytorch")
    parser.add_argument("--deadline", type=int, default=1800, help="seconds")
    options, rest = parser.parse_known_args(arguments)
    environment = {
        **os.environ,
        "SUBSTITUTE": options.substitute,
        "NAMESPACE": options.namespace,
        "DEADLINE": str(options.deadline),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", str(options.folder / "run.sh"), sys.executable, "-rf", "--reruns", "2", *rest],
        env=environment,
        capture_output=True,
        text=True,
        timeout=options.deadline + 60,
        start_new_session=True,
    )
    totals = _TOTALS.findall(done.stdout)
    if done.returncode not in (0, 1) or not totals:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n")
        print(f"the tests did not run to their end (exit {done.returncode})")
        return 2
    known = listed(PAGE.read_text(), options.substitute)
    unknown, passed = judge(failures(done.stdout), known)
    print(f"{options.substitute} in {options.namespace}: {totals[-1]}; {len(known)} listed in {PAGE.relative_to(ROOT)}")
    for test in passed:
        print(f"  passes, and is listed: {test}")
    for test in unknown:
        print(f"  fails, and is not listed: {test}")
    if unknown:
        print(done.stdout[-20000:])
    return 1 if unknown else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
