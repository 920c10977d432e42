"""The judge of the conformance run: what failed is found, and only listed tests may fail."""

from __future__ import annotations

from tests.conformance import PAGE, TITLES, failures, judge, listed

OUTPUT = """
..F.F
=========================== short test summary info ============================
FAILED tests_pytorch/models/test_restore.py::test_a[x y-1.0] - AssertionError: assert [1] == [2]
FAILED tests_pytorch/models/test_restore.py::test_a[z]
FAILED tests_pytorch/models/test_restore.py::test_b - OSError
ERROR tests_pytorch/models/test_restore.py::test_c - OSError
ERROR tests_pytorch/models/test_other.py
4 failed, 221 passed, 17 skipped, 343 warnings, 3 rerun in 594.78s (0:09:54)
"""
FILE = "models/test_restore.py::"


def test_failures_are_found_with_their_parameters() -> None:
    found = [FILE + name for name in ("test_a[x y-1.0]", "test_a[z]", "test_b", "test_c")]
    assert failures(OUTPUT) == ["models/test_other.py", *found]


def test_a_failure_that_is_not_listed_is_named_and_a_listed_one_that_passes_too() -> None:
    known = dict.fromkeys([FILE + name for name in ("test_a[z]", "test_b", "test_d")], "why")
    unknown, passed = judge(failures(OUTPUT), known)
    assert unknown == ["models/test_other.py", FILE + "test_a[x y-1.0]", FILE + "test_c"]
    assert passed == [FILE + "test_d"]
    unknown, _ = judge(failures(OUTPUT), {FILE + "test_a": "all of them"})
    assert unknown == ["models/test_other.py", FILE + "test_b", FILE + "test_c"]


def test_every_listed_test_has_a_reason() -> None:
    for substitute in TITLES:
        for test, reason in listed(PAGE.read_text(), substitute).items():
            assert "::test_" in test and len(reason) > 20, test
    assert len(listed(PAGE.read_text(), "callback")) <= 15
