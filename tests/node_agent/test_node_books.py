"""The books of a node as pure values: outbox, lanes, page events, usages, reports, identity."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.framing import FrameReader
from node_agent.app import peer_flags
from node_agent.config import parse_config
from node_agent.disk import locked, write_atomically
from node_agent.errors import NodeError
from node_agent.identity import begin_epoch, node_id_of
from node_agent.outbox import EngineOutbox
from node_agent.reports import (
    MAX_EVENTS_A_FRAME,
    PageMirror,
    PageStream,
    UsageBacklog,
    engine_report,
    node_state,
)
from node_agent.streams import LiveStreams
from policies.contract import wire
from tests.node_agent.conftest import submit

# --- outbox --------------------------------------------------------------------------------------


def drained(outbox: EngineOutbox) -> list[tuple[int, wire.AgentToEngine]]:
    reader, messages = FrameReader(), []
    while (data := outbox.pop()) is not None:
        messages += [(c, wire.decode_from_agent(m)) for c, m in reader.feed(data)]
    return messages


def test_abort_goes_in_front_of_queued_submits() -> None:
    outbox = EngineOutbox()
    outbox.submit(1, submit("a", lanes=(0,)))
    outbox.submit(1, submit("b", lanes=(1,)))
    assert outbox.abort(1, (7,)) == []
    kinds = [type(message) for _, message in drained(outbox)]
    assert kinds == [wire.Abort, wire.Submit, wire.Submit]


def test_an_abort_never_overtakes_its_own_submit() -> None:
    outbox = EngineOutbox()
    first, second = submit("a", lanes=(0, 1)), submit("b", lanes=(2,))
    outbox.submit(1, first)
    outbox.submit(2, submit("c", lanes=(0,)))
    outbox.submit(1, second)
    assert outbox.abort(1, (0, 2)) == [second]  # never sent: nothing to abort
    assert drained(outbox) == [
        (1, first),
        (1, wire.Abort((0,))),  # lane 1 goes on
        (2, submit("c", lanes=(0,))),
    ]


def test_a_cut_link_takes_its_submits_and_no_others() -> None:
    outbox = EngineOutbox()
    outbox.submit(1, submit("a"))
    outbox.submit(2, submit("b"))
    assert [message.request_id for message in outbox.abort(1, ())] == ["a"]
    assert drained(outbox) == [(1, wire.Abort(())), (2, submit("b"))]


def test_submits_are_bounded_in_number_and_bytes() -> None:
    few = EngineOutbox(max_submits=2)
    assert [few.submit(1, submit(str(i))) for i in range(3)] == [True, True, False]
    small = EngineOutbox(max_submit_bytes=400)
    assert [small.submit(1, submit(str(i))) for i in range(4)].count(True) == 2
    drained(small)
    assert small.submit(1, submit("again"))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_lane_is_told_once_and_in_order(data: st.DataObject) -> None:
    """An engine that reads the frames ends with exactly the lanes nobody aborted."""
    outbox, live, engine = EngineOutbox(), set(), set()
    next_lane = 0

    def read(count: int) -> None:
        reader = FrameReader()
        for _ in range(count):
            frame = outbox.pop()
            if frame is None:
                return
            for channel, message in reader.feed(frame):
                decoded = wire.decode_from_agent(message)
                if isinstance(decoded, wire.Submit):
                    engine.update((channel, lane) for lane in decoded.lanes)
                elif isinstance(decoded, wire.Abort):
                    lanes = decoded.lanes or [lane for c, lane in engine if c == channel]
                    engine.difference_update([(channel, lane) for lane in lanes])

    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["submit", "abort", "cut", "read"])):
            case "submit":
                channel = data.draw(st.integers(1, 2))
                lanes = tuple(range(next_lane, next_lane + data.draw(st.integers(1, 3))))
                next_lane += len(lanes)
                assert outbox.submit(channel, submit(str(lanes), lanes=lanes))
                live.update((channel, lane) for lane in lanes)
            case "abort" if live:
                some = data.draw(st.sets(st.sampled_from(sorted(live)), min_size=1))
                for channel in (1, 2):
                    lanes = tuple(lane for c, lane in sorted(some) if c == channel)
                    if lanes:
                        outbox.abort(channel, lanes)
                live -= some
            case "cut":
                channel = data.draw(st.integers(1, 2))
                outbox.abort(channel, ())
                live = {(c, lane) for c, lane in live if c != channel}
            case "read":
                read(data.draw(st.integers(1, 5)))
    read(1000)
    assert engine == live


# --- lanes ---------------------------------------------------------------------------------------


def test_a_lane_used_again_is_not_failed_for_its_old_stream() -> None:
    streams = LiveStreams()
    streams.add(0, 1, submit("old", engine=0))
    streams.add(0, 1, submit("new", engine=1))  # lane 0 again: the old one ended for the gateway
    ((entry, lanes),) = streams.lose_engine(0)
    assert (entry.request_id, lanes) == ("old", [])
    assert streams.of_lane(1, 0) is not None
    ((entry, lanes),) = streams.lose_engine(1)
    assert (entry.request_id, lanes) == ("new", [0])


def test_a_cut_link_is_not_waited_for_but_its_usage_finds_its_gateway() -> None:
    streams = LiveStreams()
    streams.add(4, 1, submit("r", lanes=(0, 1)))
    assert len(streams) == 1
    streams.cut(1)
    assert len(streams) == 0
    assert streams.of_lane(1, 0) is None
    entry = streams.end("r", 0, 1)
    assert entry is not None
    assert entry.gateway == 4
    assert streams.end("r", 0, 1) is None
    assert streams.end("r", 0, 0) is entry
    assert streams.of_request("r", 0) is None
    assert streams.gateway_of("r", 0) == 4


def test_remembered_submits_are_bounded() -> None:
    streams = LiveStreams(max_recent=2)
    for index in range(3):
        streams.add(0, 1, submit(str(index)))
        streams.end(str(index), 0, 0)
    assert [streams.gateway_of(str(index), 0) for index in range(3)] == [None, 0, 0]


# --- page events ---------------------------------------------------------------------------------

keys = st.integers(0, 20).map(lambda n: n.to_bytes(16, "little"))
tiers = st.sampled_from(["device", "host"])
events = st.one_of(
    st.builds(wire.PageStored, keys, tiers),
    st.builds(wire.PageRemoved, keys, tiers),
    st.builds(wire.CacheCleared, tiers),
)


def residency(frames: list[wire.PageEvents]) -> set[tuple[bytes, str]]:
    resident: set[tuple[bytes, str]] = set()
    for frame in frames:
        for event in frame.events:
            match event:
                case wire.PageStored(key, tier):
                    resident.add((key, tier))
                case wire.PageRemoved(key, tier):
                    resident.discard((key, tier))
                case wire.CacheCleared(tier):
                    resident = {(k, t) for k, t in resident if t != tier}
    return resident


@settings(max_examples=150, deadline=None)
@given(batches=st.lists(st.lists(events, max_size=12), max_size=12))
def test_a_snapshot_says_the_same_as_all_events(batches: list[list[wire.PageEvent]]) -> None:
    mirror, stream, first = PageMirror(), PageStream(), 0
    told: list[wire.PageEvents] = []
    for batch in batches:
        assert mirror.apply(first, batch)
        first += len(batch)
        told += stream.frames(0, batch)
    snapshot = PageStream().frames(0, mirror.snapshot(), snapshot=True)
    assert residency(snapshot) == residency(told)
    assert len(mirror) == len(residency(told))
    assert snapshot[0].snapshot


def test_page_events_of_the_engine_with_a_gap_clear_the_mirror() -> None:
    mirror = PageMirror()
    assert mirror.apply(5, [wire.PageStored(b"a" * 16)])
    assert not mirror.apply(7, [wire.PageStored(b"b" * 16)])
    assert residency(PageStream().frames(0, mirror.snapshot())) == {(b"b" * 16, "device")}
    mirror.restart()
    assert mirror.apply(0, [])
    assert len(mirror) == 0


def test_large_snapshots_go_in_pieces_without_a_gap() -> None:
    many: list[wire.PageEvent] = [wire.CacheCleared()]
    many += [wire.PageStored(i.to_bytes(16, "little")) for i in range(2 * MAX_EVENTS_A_FRAME)]
    stream = PageStream()
    stream.frames(3, [wire.CacheCleared()])
    frames = stream.frames(3, many, snapshot=True)
    assert [frame.snapshot for frame in frames] == [True, False, False]
    assert [frame.first for frame in frames] == [
        1,
        1 + MAX_EVENTS_A_FRAME,
        1 + 2 * MAX_EVENTS_A_FRAME,
    ]
    assert max(len(wire.encode(frame)) for frame in frames) < wire.BUNDLE_PART_BYTES


# --- usages and reports --------------------------------------------------------------------------


def usage(request_id: str, lane: int = 0) -> wire.UsageRecord:
    return wire.UsageRecord(request_id, 0, lane, "stop", wire.Usage(1, 0, 1))


def test_the_backlog_drops_the_oldest_and_counts() -> None:
    backlog = UsageBacklog(limit=2)
    for name in "abc":
        backlog.add(usage(name), 0.0)
    assert [record.request_id for record in backlog.all(0.0)] == ["b", "c"]
    assert backlog.dropped == 1
    assert backlog.acknowledge("b", 0)
    assert not backlog.acknowledge("a", 0)
    assert len(backlog) == 1


def test_an_acknowledgement_is_for_one_stream() -> None:
    backlog = UsageBacklog()
    backlog.add(usage("r", 0), 0.0)
    backlog.add(usage("r", 1), 0.0)
    backlog.acknowledge("r", 0)
    assert [record.lane for record in backlog.all(0.0)] == [1]


def test_an_acknowledgement_that_names_a_lane_is_for_that_one() -> None:
    backlog = UsageBacklog()
    for lane in (3, 5, 7):
        backlog.add(usage("r", lane), 0.0)
    assert backlog.acknowledge("r", 0, 5)
    assert not backlog.acknowledge("r", 0, 5)
    assert [record.lane for record in backlog.all(0.0)] == [3, 7]
    assert len(backlog) == 2


def test_what_is_not_acknowledged_is_told_again_but_not_each_second() -> None:
    backlog = UsageBacklog()
    backlog.add(usage("r"), 0.0)
    told = [second for second in range(10) if backlog.overdue(float(second))]
    assert told == [3, 6, 9]


def test_states_of_a_node() -> None:
    ready, down = wire.EngineReport(0, "ready"), wire.EngineReport(1, "down")
    assert node_state([], is_draining=False, was_ready=False) == "joining"
    assert node_state([down], is_draining=False, was_ready=True) == "suspect"
    assert node_state([ready, down], is_draining=False, was_ready=True) == "ready"
    assert node_state([ready], is_draining=True, was_ready=True) == "draining"
    aged = engine_report(wire.EngineReport(0, "ready", step_age_s=1), age_s=6, is_down=True)
    assert (aged.state, aged.step_age_s) == ("down", 7)


# --- identity and disk ---------------------------------------------------------------------------


def test_the_id_stays_and_the_epoch_grows(tmp_path: Path) -> None:
    assert node_id_of(tmp_path, None, lambda: "n-first") == "n-first"
    assert node_id_of(tmp_path, None, lambda: "n-second") == "n-first"
    assert node_id_of(tmp_path, "n9", lambda: "n-second") == "n9"
    epochs = [begin_epoch(tmp_path, "n9", wall_s=t).node_epoch for t in (100, 100, 50, 200)]
    assert epochs == [100, 101, 102, 200]
    assert begin_epoch(tmp_path, "n1", wall_s=3).node_epoch == 3  # another node, the same home
    (tmp_path / "nodes" / "n9" / "node-epoch").write_text("many")
    with pytest.raises(NodeError, match="node-epoch"):
        begin_epoch(tmp_path, "n9", wall_s=0)


def test_two_agents_do_not_share_an_id(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "lock", timeout_s=0),
        pytest.raises(NodeError, match="held by another"),
        locked(tmp_path / "lock", timeout_s=0),
    ):
        raise AssertionError("held twice")
    with locked(tmp_path / "lock", timeout_s=0):
        assert (tmp_path / "lock").exists()


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "f"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "not bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    with pytest.raises(NodeError, match="folder"):
        write_atomically(target / "below a file", b"")


# --- command line --------------------------------------------------------------------------------


def test_the_command_line_in_one_value(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    config = parse_config(
        [
            *("--gateway", "ws://127.0.0.1:9001", "--gateway", "https://g.example/x"),
            *("--join-token-file", str(tmp_path / "token"), "--node-id", "n1"),
            *("--model", "a", "--model", "b", "--home", str(tmp_path), "--threads", "2"),
            *("--kv-dtype", "fp32", "--compute", "exact", "--announce", "fast"),
            *("--kv-device-tokens", "4096"),
            *("--peer-host", "10.0.0.7", "--peer-port", "7400"),
        ]
    )
    assert [peer_flags(config, index)[1::2] for index in range(2)] == [
        ("10.0.0.7", "7400"),
        ("10.0.0.7", "7401"),
    ]
    assert config.gateway_urls == ("ws://127.0.0.1:9001/link/v1", "wss://g.example/x")
    assert config.join_token == "secret"
    assert config.models == ("a", "b")
    assert config.engine_flags == (
        *("--kv-dtype", "fp32", "--compute", "exact", "--announce", "fast"),
        *("--kv-device-tokens", "4096"),
    )


def test_engines_take_part_in_splits_on_free_ports_unless_told_not_to() -> None:
    needed = ["--gateway", "ws://x", "--join-token", "t"]
    by_default, none = parse_config(needed), parse_config([*needed, "--peer-port", "none"])
    assert peer_flags(by_default, 1)[1::2] == ("127.0.0.1", "0")
    assert peer_flags(none, 1)[1::2] == ("127.0.0.1", "none")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--gateway", "ftp://x", "--join-token", "t"], "--gateway"),
        (["--gateway", "ws://x"], "--join-token"),
        (["--gateway", "ws://x", "--join-token-file", "/nonexistent"], "--join-token-file"),
        (["--gateway", "ws://x", "--join-token", "t\nX: y"], "--join-token"),
        (["--gateway", "ws://x", "--join-token", "t", "--node-id", "../up"], "--node-id"),
        (["--gateway", "ws://x", "--join-token", "t", "--node-id", ".."], "--node-id"),
        (["--gateway", "ws://x", "--join-token", "t", "--threads", "0"], "--threads"),
        (["--gateway", "ws://x", "--join-token", "t", "--compute", "quick"], "--compute"),
        (
            [
                *("--gateway", "ws://x", "--join-token", "t"),
                *("--compute", "fast", "--announce", "exact"),
            ],
            "--announce",
        ),
        (["--gateway", "ws://x", "--join-token", "t", "--bundle", "b"], "--bundle"),
        (["--gateway", "ws://x", "--join-token", "t", "--peer-port", "no"], "--peer-port"),
        (["--gateway", "ws://x", "--join-token", "t", "--peer-host", "::"], "--peer-host"),
        (
            [
                *(a for i in range(33) for a in ("--gateway", f"ws://x:{i + 1}")),
                "--join-token",
                "t",
            ],
            "--gateway",
        ),
    ],
)
def test_a_wrong_flag_is_named(arguments: list[str], field: str) -> None:
    with pytest.raises(NodeError) as caught:
        parse_config(arguments)
    assert caught.value.field == field
    assert caught.value.remedy
