"""What goes over the socket comes out the same, however the bytes are cut; what is not the protocol is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.agent import protocol
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.messages import (
    Bye,
    Committed,
    Complete,
    Delete,
    Durable,
    Failed,
    FileReady,
    Flush,
    Flushed,
    GiveUp,
    Hello,
    Message,
    NameRefused,
    Prepare,
    Recorded,
    Refused,
    Rescan,
    Seal,
    SealedFile,
    Trace,
    Traced,
    TraceEnded,
    Welcome,
)
from resiliency.agent.protocol import PROTOCOL_VERSION, Framer, config_from_json, config_to_json, pack
from resiliency.errors import AgentError
from resiliency.storage.manifest import BlockShare
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId

CONFIG = AgentConfig(
    run="run",
    node="n0",
    attempt=3,
    token="0a0b0c",
    world_size=4,
    local_ranks=(0, 1),
    shared=False,
    local=TierSpec(address="/ckpts", name="local", keep=3),
    durable=True,
    remotes=(
        TierSpec(address="gs://b/j", name="store", keep=None, keep_named=False, storage_options={"token": "anon"}),
    ),
    events="/ckpts/e.jsonl",
    drain_s=1.5,
)
STEP = StepId(7, 3, "0a0b0c", 1)
SEAL = Seal(
    id=STEP,
    files=(
        SealedFile(
            shard=0, path="/ckpts/x", inode=12, nbytes=100, block_bytes=50, sections=(40,), digests=("0" * 16,) * 3
        ),
        SealedFile(shard=2, path="/ckpts/y", inode=13, nbytes=1, block_bytes=50, digests=("1" * 16,)),
    ),
    plan="p",
    share=BlockShare(first=1, digests=("2" * 16,)),
    share_inode=14,
    replicated=True,
    names=("a.ckpt", "b/c.ckpt"),
    supersedes=("old",),
    created=12.5,
    info={"epoch": 1, "nested": {"a": [1, None]}},
    tiers=("store",),
    exact=False,
)
FILE = json.loads(pack(SEAL))["files"][0]
#: At least one of each kind.
MESSAGES: list[Message] = [
    Hello(version=PROTOCOL_VERSION, rank=1, config=CONFIG),
    SEAL,
    Prepare(nbytes=5, count=2),
    Complete(id=STEP),
    GiveUp(id=STEP, reason="it is full"),
    Delete(names=("a.ckpt",), after=STEP),
    Delete(names=()),
    Rescan(loaded=StepId(5, 2, "0a0b0c", 1, 1), line=7),
    Flush(ticket=1, stage=Stage.DURABLE, tier="store", timeout_s=2),
    Trace(id=STEP, end=True),
    Bye(),
    Welcome(pid=3),
    Refused(reason="\u00e9 \n"),
    Recorded(id=STEP),
    Committed(id=STEP, tier="local"),
    Durable(id=STEP, tier="store"),
    Failed(id=STEP, tier="store", reason="down", retrying=True, gave_way=True),
    NameRefused(id=STEP, tier="local", name="last.ckpt", reason="it is another run's"),
    FileReady(path="/x", inode=1, nbytes=5, is_new=True),
    Flushed(ticket=1, done=False),
    Traced(id=STEP, name="fsync", began_ns=1, ended_ns=2, pid=3, thread=4, thread_name="sync", facts={"tier": "local"}),
    TraceEnded(id=STEP),
]


def test_a_config_is_decoded_as_it_was_encoded() -> None:
    assert config_from_json(config_to_json(CONFIG)) == CONFIG


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AgentConfig)])
def test_every_field_of_the_config_is_sent(field: str) -> None:
    """A field that is forgotten would come back as its default, and differ between trainer and agent."""
    assert field in json.loads(config_to_json(CONFIG))


def test_one_address_for_each_directory_run_and_node(tmp_path: Path) -> None:
    spec = dataclasses.replace(CONFIG.local, address=str(tmp_path))
    base = dataclasses.replace(CONFIG, local=spec)
    others = [
        dataclasses.replace(base, run="other"),
        dataclasses.replace(base, node="n1"),
        dataclasses.replace(base, local=dataclasses.replace(spec, address=str(tmp_path / "x"))),
    ]
    assert len({base.address, *(other.address for other in others)}) == 4
    # The same folder by another path, and the next attempt, mean the same agent.
    (tmp_path / "link").symlink_to(tmp_path)
    assert (
        dataclasses.replace(base, local=dataclasses.replace(spec, address=str(tmp_path / "link"))).address
        == base.address
    )
    assert dataclasses.replace(base, attempt=4, token="ffffff").address == base.address
    assert base.address.startswith("\0") and len(base.address) < 100


def test_address_differs_between_users(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = CONFIG.address
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert CONFIG.address != mine


def test_there_is_a_message_of_every_kind_above() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


@settings(deadline=None, database=None)
@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.data())
def test_messages_survive_any_cutting(messages: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(pack, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    framer = Framer()
    got = [
        message for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) for message in framer.feed(stream[a:b])
    ]
    assert got == messages


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_field_is_checked(message: Message) -> None:
    """A field of another type, a missing one or one too many is refused, and named."""
    fields = json.loads(pack(message))
    required = [
        field.name
        for field in dataclasses.fields(message)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for name in required:
        with pytest.raises(AgentError, match=name):
            list(
                Framer().feed(json.dumps({key: value for key, value in fields.items() if key != name}).encode() + b"\n")
            )
    for name in fields.keys() - {"type"}:
        wrong: object = 3 if isinstance(fields[name], (str, list, dict)) else {"x": 1}
        with pytest.raises(AgentError, match=name):
            list(Framer().feed(json.dumps({**fields, name: wrong}).encode() + b"\n"))
    with pytest.raises(AgentError, match="no field 'colour'"):
        list(Framer().feed(json.dumps({**fields, "colour": 1}).encode() + b"\n"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"id": {"step": 7, "attempt": 3, "token": "0a0b0c"}}, "Seal.id"),
        ({"id": {"step": True, "attempt": 3, "token": "0a0b0c", "serial": 0}}, "Seal.id"),
        ({"id": {"step": -1, "attempt": 3, "token": "0a0b0c", "serial": 0}}, "Seal.id"),
        ({"id": {"step": 7, "attempt": 3, "token": "../../x", "serial": 0}}, "Seal.id"),
        ({"files": None}, "Seal.files"),
        ({"files": [5]}, "Seal.files"),
        ({"files": [{**FILE, "nbytes": True}]}, "nbytes"),
        ({"files": [{**FILE, "nbytes": 1.5}]}, "nbytes"),
        ({"files": [{**FILE, "digests": None}]}, "digests"),
        ({"files": [{**FILE, "sections": ["x"]}]}, "sections"),
        ({"files": [{**FILE, "colour": 1}]}, "colour"),
        ({"share": {"first": 0}}, "digests"),
        ({"share": {"first": "0", "digests": []}}, "first"),
        ({"names": ["a", 1]}, "Seal.names"),
        ({"type": "Dance"}, "Dance"),
        ({"type": 3}, "3"),
        ({"type": ["Seal"]}, "list"),
    ],
    ids=str,
)
def test_an_invalid_value_is_refused_with_its_field(change: dict[str, object], what: str) -> None:
    with pytest.raises(AgentError, match=re.escape(what)):
        list(Framer().feed(json.dumps({**json.loads(pack(SEAL)), **change}).encode() + b"\n"))


def test_a_stage_that_does_not_exist_is_refused() -> None:
    line = pack(Flush(ticket=1, stage=Stage.DURABLE, timeout_s=1)).replace(b"DURABLE", b"UPLOADED")
    with pytest.raises(AgentError, match="'UPLOADED', not one of COPIED"):
        list(Framer().feed(line))


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"{}", b"[]", b"3", b"null", b'"type"', b'{"Type":1}', b"\xff\xfe", b"GET / HTTP/1.1\r", b'{"type":'],
)
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(AgentError):
        list(Framer().feed(line + b"\n"))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(AgentError):
        list(Framer().feed(b'{"type":' + b"[" * 100_000 + b"\n"))


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MAX_LINE", 1000)
    framer = Framer()
    assert list(framer.feed(b"x" * 900)) == []
    with pytest.raises(AgentError, match="1000 bytes"):
        list(framer.feed(b"x" * 200))
