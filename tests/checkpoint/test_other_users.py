"""Folders of several users, and folders that a user cannot read: it works, or it is refused at once and says why."""
# ruff: noqa: F811 (fixtures that are imported)

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.other_user import ALICE, BOB, OtherUsers, other_users, shared_folder  # noqa: F401 (fixtures)

SHARE, KEEP_TO_MYSELF = 0o002, 0o022

SAVE = """
with checkpointer(agent=AGENT) as engine:
    restored = engine.load()
    result["loaded"] = restored and [restored.step, float(restored.state["w"][0])]
    step = (restored.step if restored else 0) + 1
    save(engine, step, "last.ckpt")
result["last"] = float(load_path(locate(os.path.join(folder, "last.ckpt")))[0]["w"][0])
result["steps"] = sorted(name[:10] for name in os.listdir(os.path.join(folder, ".resiliency/run/steps")))
(log,) = [name for name in os.listdir(os.path.join(folder, ".resiliency/run/events")) if name.startswith("agent-")]
with open(os.path.join(folder, ".resiliency/run/events", log)) as file:
    result["log"] = [json.loads(line)["attempt"] for line in file][-1]
"""


def test_two_users_who_share_a_folder_take_turns(shared_folder: Path, other_users: OtherUsers) -> None:
    """Each reads, names, deletes and appends to what the other made."""
    turns = ((ALICE, "embedded"), (BOB, "embedded"), (ALICE, "process"), (BOB, "process"))
    results = other_users.run(
        shared_folder, *((user, SHARE, SAVE.replace("AGENT", repr(agent))) for user, agent in turns)
    )
    for turn, result in enumerate(results):
        assert result["loaded"] == ([turn, float(turn)] if turn else None)
        assert result["last"] == turn + 1 and result["steps"] == [f"{turn + 1:010d}"]
        assert result["warnings"] == [] and result["log"] == turn + 1


def test_a_user_who_may_not_write_is_told_at_once_and_may_still_read(
    shared_folder: Path, other_users: OtherUsers
) -> None:
    refused = """
    import time
    began = time.monotonic()
    try:
        checkpointer().open()
    except Exception as error:
        result["refused"] = [type(error).__name__, str(error), time.monotonic() - began]
    result["read"] = float(load_path(locate(os.path.join(folder, "last.ckpt")))[0]["w"][0])
    """
    alice = SAVE.replace("AGENT", "'embedded'")
    _, told, after = other_users.run(
        shared_folder, (ALICE, KEEP_TO_MYSELF, alice), (BOB, KEEP_TO_MYSELF, refused), (ALICE, KEEP_TO_MYSELF, alice)
    )
    kind, text, took_s = told["refused"]
    assert kind == "TierError" and took_s < 20
    assert "Permission denied" in text and str(shared_folder / ".resiliency/run") in text and "write permission" in text
    assert told["read"] == 1.0
    assert after["loaded"] == [1, 1.0] and after["warnings"] == []


def test_steps_that_another_user_keeps_to_himself_are_loaded_and_do_not_hold_up_saves(
    shared_folder: Path, other_users: OtherUsers
) -> None:
    """Alice made the folders for the group, but a step of hers with another umask."""
    first = "with checkpointer() as engine:\n    save(engine, 1)\n"
    second = "with checkpointer(keep=5) as engine:\n    save(engine, 2)\n    save(engine, 3)\n"
    bob = SAVE.replace("AGENT", "'embedded'")
    *_, result, again = other_users.run(
        shared_folder, (ALICE, SHARE, first), (ALICE, KEEP_TO_MYSELF, second), (BOB, SHARE, bob), (BOB, SHARE, bob)
    )
    assert result["loaded"] == [3, 3.0]
    # What he may delete is deleted (the first), what he may not stays, and is said once.
    assert result["steps"] == ["0000000002", "0000000003", "0000000004"]
    (told,) = result["warnings"]
    assert "step 2 could not be deleted" in told and "Permission denied" in told
    assert again["loaded"] == [4, 4.0] and again["steps"] == ["0000000002", "0000000003", "0000000005"]


def test_a_folder_that_cannot_be_read_blocks_neither_loading_nor_locating_nor_saving(
    shared_folder: Path,
    other_users: OtherUsers,
) -> None:
    save_three = """
    with checkpointer(keep=5) as engine:
        for step in (1, 2, 3):
            save(engine, step)
    """
    # As root, whom nothing stops.
    close = """
    steps = os.path.join(folder, ".resiliency/run/steps")
    (step,) = [name for name in os.listdir(steps) if name.startswith(STEP)]
    os.chown(os.path.join(steps, step), 0, 0)
    os.chmod(os.path.join(steps, step), 0o700)
    """
    use = """
    located = locate(folder)
    result["located"] = [located.id.step, float(load_path(located)[0]["w"][0])]
    with checkpointer(keep=2) as engine:
        restored = engine.load()
        result["loaded"] = [restored.step, float(restored.state["w"][0])]
        save(engine, 10 + restored.step)
    result["steps"] = sorted(int(name[:10]) for name in os.listdir(os.path.join(folder, ".resiliency/run/steps")))
    """
    _, old, newest = other_users.run(
        shared_folder,
        (ALICE, SHARE, save_three),
        (None, 0, close.replace("STEP", repr(f"{1:010d}"))),
        (BOB, SHARE, use),
        (None, 0, close.replace("STEP", repr(f"{13:010d}"))),
        (BOB, SHARE, use),
    )
    assert old["located"] == old["loaded"] == [3, 3.0]
    assert old["steps"] == [1, 3, 13], "steps were not pruned, or one that nobody can read was"
    assert old["warnings"] == []
    # The newest is out of reach: the one before it is taken, and that is said.
    assert newest["located"] == newest["loaded"] == [3, 3.0]
    assert newest["steps"] == [1, 3, 13, 13], "of two attempts"
    assert [text for text in newest["warnings"] if "is restored instead" in text and "Permission denied" in text]
