"""What goes over the socket comes out the same, however the bytes are cut; what is not the protocol is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.agent import protocol
from resiliency.agent.protocol import AgentConfig, Framer, TierSpec, pack, step_token
from resiliency.errors import AgentError, ConfigError
from resiliency.storage.manifest import StepId

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
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3),
)


def test_config_survives_the_way() -> None:
    assert AgentConfig.from_json(CONFIG.to_json()) == CONFIG


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AgentConfig)])
def test_every_field_of_the_config_is_sent(field: str) -> None:
    """A field that to_json forgets would come back as its default, and differ between trainer and agent."""
    assert field in json.loads(CONFIG.to_json())


def test_one_address_for_each_directory_run_and_node(tmp_path: Path) -> None:
    spec = dataclasses.replace(CONFIG.local, address=str(tmp_path))
    base = dataclasses.replace(CONFIG, local=spec)
    others = [
        dataclasses.replace(base, run="other"),
        dataclasses.replace(base, node="n1"),
        dataclasses.replace(base, local=dataclasses.replace(spec, address=str(tmp_path / "x"))),
    ]
    assert len({base.address(), *(other.address() for other in others)}) == 4
    # The same folder by another path, and the next attempt, mean the same agent.
    (tmp_path / "link").symlink_to(tmp_path)
    assert (
        dataclasses.replace(base, local=dataclasses.replace(spec, address=str(tmp_path / "link"))).address()
        == base.address()
    )
    assert dataclasses.replace(base, attempt=4, token="ffffff").address() == base.address()
    assert base.address().startswith("\0") and len(base.address()) < 100


def test_address_differs_between_users(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = CONFIG.address()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert CONFIG.address() != mine


@settings(deadline=None, database=None)
@given(st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), max_size=6), st.data())
def test_messages_survive_any_cutting(messages: list[dict[str, object]], data: st.DataObject) -> None:
    messages = [{**message, "t": "x"} for message in messages]
    stream = b"".join(map(pack, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    framer = Framer()
    got = [
        message for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) for message in framer.feed(stream[a:b])
    ]
    assert got == messages


@pytest.mark.parametrize(
    "line", [b"", b"x", b"{}", b"[]", b"3", b"null", b'"t"', b'{"T":1}', b"\xff\xfe", b"GET / HTTP/1.1\r", b'{"t":']
)
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(AgentError):
        list(Framer().feed(line + b"\n"))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(AgentError):
        list(Framer().feed(b'{"t":' + b"[" * 100_000 + b"\n"))


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MAX_LINE", 1000)
    framer = Framer()
    assert list(framer.feed(b"x" * 900)) == []
    with pytest.raises(AgentError, match="1000 bytes"):
        list(framer.feed(b"x" * 200))


def test_tokens_tell_saves_of_one_step_apart() -> None:
    tokens = [step_token("0a0b0c", serial) for serial in range(256)]
    assert len(set(tokens)) == 256
    assert all(StepId.parse(StepId(1, 1, token).dirname) == StepId(1, 1, token) for token in tokens)
    assert CONFIG.step_id({"step": 7, "serial": 1}) == StepId(7, 3, "0a0b0c01")


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep=0"):
        TierSpec(address="/x", name="local", keep=0)
