"""A node with a scripted engine on the real link: what a gateway sees."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from node_agent.link import LinkTiming
from node_agent.supervisor import EngineTiming
from policies.contract import wire
from tests.node_agent.conftest import (
    TOKEN,
    FakeGateway,
    StartNode,
    byte_bundle,
    prompt_of,
    submit,
    until,
)

pytestmark = pytest.mark.anyio


async def test_hello_carries_version_id_epoch_and_the_join_token(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running():
        hello = await gateway.first(wire.Hello)
        assert (hello.version, hello.min_version) == (wire.WIRE_VERSION, wire.MIN_WIRE_VERSION)
        assert (hello.node_id, hello.node_epoch, hello.role) == ("n1", 7, "mixed")
        assert hello.bundles == ((await gateway.engines())[0].bundle_digest,)
        assert gateway.credentials == [f"Bearer {TOKEN}"]
        report = await gateway.first(wire.Report)
        assert report.state in ("joining", "ready")


@pytest.mark.parametrize(
    "answer",
    [
        wire.Welcome(wire.WIRE_VERSION + 1, "g"),
        wire.Refused("version", "too old"),
        wire.Drain(True),
    ],
)
async def test_a_refused_node_comes_back_with_backoff(
    start_node: StartNode, answer: wire.GatewayToNode
) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running():
        gateway.welcome = answer
        await until(lambda: gateway.links >= 2, "a second try")
        assert len(gateway.messages) <= 1  # a Hello and nothing after it
        gateway.welcome = wire.Welcome(wire.WIRE_VERSION, "g")
        await gateway.first(wire.Report)


async def test_bundle_comes_on_request_in_parts(start_node: StartNode, tmp_path: Path) -> None:
    bundle = byte_bundle(tmp_path, filler=5 << 19)
    async with FakeGateway().listening() as gateway, start_node(gateway, bundle=bundle).running():
        (info,) = await gateway.engines()
        assert not gateway.of(wire.BundlePart)
        welcome = wire.Welcome(wire.WIRE_VERSION, "g", (info.bundle_digest,))
        await gateway.send(welcome, welcome)  # asked twice while it is under way
        await until(lambda: len(gateway.of(wire.BundlePart)) >= 3, "three parts")
        parts = gateway.of(wire.BundlePart)
        assert [(part.index, part.count) for part in parts[:3]] == [(0, 3), (1, 3), (2, 3)]
        assert max(len(part.data) for part in parts) <= wire.BUNDLE_PART_BYTES
        assert b"".join(part.data for part in parts[:3]) == bundle.read_bytes()


async def test_submit_to_steps_to_finish(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running() as node:
        (info,) = await gateway.engines()
        assert info.model == "scripted"
        await gateway.send(submit("r1", "hello you", lanes=(3,)))
        end = await gateway.end(3)
        answer = [*prompt_of("good day"), 257]
        assert gateway.tokens(3) == answer
        assert end == wire.Finished(3, "stop", wire.Usage(9, 0, len(answer)))
        await until(lambda: len(node.links[0].usage) == 1, "the usage record in the backlog")
        assert len(node.node.streams) == 0
        await gateway.send(wire.UsageAck((("r1", 0),)))
        await until(lambda: not len(node.links[0].usage), "the acknowledgement")
        assert node.lines[-1]["event"] == "ready"


async def test_stop_string_ends_a_lane(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running():
        await gateway.engines()
        await gateway.send(submit("r1", "slow"))
        await until(lambda: len(gateway.tokens(0)) >= 4, "four tokens")
        await gateway.send(wire.FinishLane(0, 2))
        end = await gateway.end(0)
        assert isinstance(end, wire.Finished)
        assert end.reason == "stop"
        assert end.usage.completion_tokens == 2


async def test_an_abort_stops_the_engine_and_frees_the_lane(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running() as node:
        await gateway.engines()
        await gateway.send(submit("r1", "slow"))
        await until(lambda: gateway.tokens(0), "a first token")
        begun = time.monotonic()
        await gateway.send(wire.Abort((0,)), wire.Abort((0,)), wire.Abort((9,)))
        end = await gateway.end(0)
        assert time.monotonic() - begun < 1.0
        assert isinstance(end, wire.Finished)
        assert end.reason == "abort"
        await gateway.send(submit("r2", "hello"))  # the same lane again
        await until(lambda: len(gateway.ends(0)) == 2, "the second end")
        assert len(node.node.streams) == 0


async def test_duplicate_submit_runs_once(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running() as node:
        await gateway.engines()
        first = submit("r1", "hello")
        await gateway.send(first, first)
        await gateway.end(0)
        await gateway.send(first)  # also after its end
        await gateway.send(submit("r1", "hello", attempt=1, lanes=(1,)))  # a new attempt runs
        await gateway.end(1)
        assert node.node.repeated_submits == 2
        assert len(gateway.ends(0)) == 1
        assert len(gateway.tokens(0)) == len(gateway.tokens(1)) == 9


async def test_two_gateways_with_equal_lane_numbers(start_node: StartNode) -> None:
    async with (
        FakeGateway().listening() as one,
        FakeGateway().listening() as two,
        start_node(one, two).running(),
    ):
        await one.engines()
        await two.engines()
        await one.send(submit("a", "slow"))
        await two.send(submit("b", "hello"))
        await two.end(0)
        assert two.tokens(0) == [*prompt_of("good day"), 257]
        await one.send(wire.Abort((0,)))
        assert isinstance(await one.end(0), wire.Finished)
        assert one.tokens(0) == list(prompt_of("abcdefghij" * 40))[: len(one.tokens(0))]
        # An id that is another gateway's is refused, not silently lost.
        await two.send(submit("a", "hello", lanes=(5,)))
        refused = await two.end(5)
        assert isinstance(refused, wire.Failed)
        assert refused.code == "invalid_submit"


async def test_two_engines_of_one_node(start_node: StartNode) -> None:
    node = start_node
    async with (
        FakeGateway().listening() as gateway,
        node(gateway, models=("m1", "m2")).running() as running,
    ):
        await until(lambda: len(running.node.infos()) == 2, "both engines")
        await gateway.send(submit("a", engine=0), submit("b", engine=1, lanes=(1,)))
        await gateway.send(submit("c", engine=2, lanes=(2,)))
        await gateway.end(0)
        await gateway.end(1)
        unknown = await gateway.end(2)
        assert isinstance(unknown, wire.Failed)
        assert unknown.code == "engine_lost"
        assert {step.engine for step in gateway.of(wire.Step) if step.tokens} == {0, 1}


async def test_link_cut_stops_streams_and_resends_usage_until_acknowledged(
    start_node: StartNode,
) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running() as node:
        await gateway.engines()
        await gateway.send(submit("done", "hello" + "x" * 40), submit("cut", "slow", lanes=(1,)))
        await gateway.end(0)
        await until(lambda: gateway.tokens(1), "tokens of the second")
        await until(lambda: gateway.resident(), "page events")
        before = gateway.resident()
        old_channel = node.links[0].channel
        gateway.cut()
        await until(lambda: gateway.links == 2, "the link again")
        await until(lambda: len(gateway.of(wire.UsageRecord)) == 2, "both usages")
        by_id = {record.request_id: record for record in gateway.of(wire.UsageRecord)}
        assert by_id["done"].reason == "stop"
        assert by_id["cut"].reason == "abort"
        assert node.links[0].channel != old_channel
        assert not gateway.tokens(1)  # nothing of the old link's streams arrives on the new one
        await until(lambda: gateway.resident() >= before, "a snapshot with the same pages")
        assert gateway.of(wire.PageEvents)[0].snapshot
        gateway.cut()
        await until(lambda: gateway.links == 3, "the link once more")
        await until(lambda: len(gateway.of(wire.UsageRecord)) == 2, "both once more")
        await gateway.send(wire.UsageAck((("done", 0), ("cut", 0))))
        await until(lambda: not len(node.links[0].usage), "an empty backlog")


async def test_usage_of_a_stream_cut_before_its_record_still_comes(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running():
        await gateway.engines()
        await gateway.send(submit("r", "slow"))
        await until(lambda: gateway.tokens(0), "a token")
        gateway.cut()
        await until(lambda: gateway.links == 2, "the link again")
        record = await gateway.first(wire.UsageRecord)
        assert (record.request_id, record.lane, record.reason) == ("r", 0, "abort")


async def test_page_event_gap_is_healed_by_resync(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running():
        await gateway.engines()
        await gateway.send(submit("r", "hello" + "x" * 60))
        await until(lambda: gateway.resident(), "page events")
        whole = gateway.resident()
        seen = len(gateway.of(wire.PageEvents))
        await gateway.send(wire.Resync(0), wire.Resync(99))
        await until(lambda: len(gateway.of(wire.PageEvents)) > seen, "a snapshot")
        frame = gateway.of(wire.PageEvents)[seen]
        assert frame.snapshot
        assert isinstance(frame.events[0], wire.CacheCleared)
        stored = {e.page_key for e in frame.events if isinstance(e, wire.PageStored)}
        assert stored == whole
        assert {len(key) for key in stored} == {16}


async def test_unknown_frames_are_counted_and_do_not_cut_the_link(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running() as node:
        await gateway.engines()
        await gateway.send(b"\xc1", b"\x91\xa7unknown", submit("r"))
        await gateway.end(0)
        assert node.links[0].unknown_frames == 2
        assert gateway.links == 1


async def test_an_engine_that_comes_up_between_hello_and_welcome_is_announced(
    start_node: StartNode,
) -> None:
    gateway = FakeGateway()
    gateway.welcome_at_once.clear()
    async with gateway.listening(), start_node(gateway).running() as node:
        hello = await gateway.first(wire.Hello)
        assert hello.engines == ()
        await until(lambda: node.node.infos(), "the engine")
        gateway.welcome_at_once.set()
        changed = await gateway.first(wire.EnginesChanged)
        assert changed.engines == node.node.infos()


async def test_a_gateway_that_does_not_read_loses_its_link_and_nothing_else(
    start_node: StartNode,
) -> None:
    slow = FakeGateway()
    slow.is_reading = False
    timing = LinkTiming(backoff_s=0.05, backoff_cap_s=0.2, max_waiting_bytes=8 << 20)
    async with (
        slow.listening(),
        FakeGateway().listening() as good,
        start_node(slow, good, link_timing=timing).running() as node,
    ):
        await good.engines()
        await until(lambda: node.links[0].is_open, "the slow link")
        links = slow.links
        slow.is_reading = True
        for _ in range(24):
            node.links[0].send(bytes(1 << 20))
        assert node.links[0].is_open  # the cut comes from its own task
        await until(lambda: slow.links > links, "another try")
        await slow.first(wire.Report)
        await good.send(submit("r"))
        assert isinstance(await good.end(0), wire.Finished)
        assert good.links == 1


# --- faults --------------------------------------------------------------------------------------


async def test_engine_killed_mid_stream_fails_its_streams_at_once_on_every_link(
    start_node: StartNode,
) -> None:
    async with (
        FakeGateway().listening() as one,
        FakeGateway().listening() as two,
        start_node(one, two).running() as node,
    ):
        await one.engines()
        await two.engines()
        await one.send(submit("a", "slow", lanes=(0,)), submit("b", "slow page", lanes=(1,)))
        await two.send(submit("c", "slow" + "y" * 40))
        await until(lambda: one.tokens(0) and one.tokens(1) and two.tokens(0), "tokens")
        os.kill(node.pid(), signal.SIGKILL)
        killed = time.monotonic()
        ends = [await one.end(0), await one.end(1), await two.end(0)]
        assert time.monotonic() - killed < 1.0
        assert [(type(end), getattr(end, "code", "")) for end in ends] == [
            (wire.Failed, "engine_lost")
        ] * 3
        assert len(node.node.streams) == 0
        await until(
            lambda: (
                [c.engines for c in one.of(wire.EnginesChanged)][-2:-1] == [()]
                and one.of(wire.EnginesChanged)[-1].engines
            ),
            "the engine gone and back",
        )
        assert two.resident() == set()
        await one.send(submit("d", "hello", lanes=(2,)))
        assert isinstance(await one.end(2), wire.Finished)
        assert node.engines[0].restarts == 1


async def test_a_submit_while_the_engine_is_down_fails_at_once(start_node: StartNode) -> None:
    slow = EngineTiming(up_s=30, backoff_s=5, watch_s=0.05)
    async with (
        FakeGateway().listening() as gateway,
        start_node(gateway, timing=slow).running() as n,
    ):
        await gateway.engines()
        os.kill(n.pid(), signal.SIGKILL)
        await until(lambda: n.engines[0].info is None, "the loss")
        await gateway.send(submit("r"))
        end = await gateway.end(0)
        assert isinstance(end, wire.Failed)
        assert end.code == "engine_lost"
        await until(lambda: gateway.of(wire.Report)[-1].state == "suspect", "suspect")
        assert gateway.of(wire.Report)[-1].engines[0].state == "down"


async def test_script_that_dies_fails_its_stream_and_comes_back(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running() as node:
        await gateway.engines()
        await gateway.send(submit("r", "die"))
        end = await gateway.end(0)
        assert isinstance(end, wire.Failed)
        assert end.code == "engine_lost"
        await until(lambda: node.engines[0].restarts and node.engines[0].info, "a new engine")


async def test_a_stopped_engine_is_reported_down_then_killed_and_replaced(
    start_node: StartNode,
) -> None:
    timing = EngineTiming(
        up_s=30, silent_s=1.5, kill_s=3.0, backoff_s=0.05, backoff_cap_s=0.1, watch_s=0.05
    )
    async with (
        FakeGateway().listening() as gateway,
        start_node(gateway, timing=timing).running() as node,
    ):
        await gateway.engines()
        await gateway.send(submit("r", "slow"))
        await until(lambda: gateway.tokens(0), "tokens")
        pid = node.pid()
        os.kill(pid, signal.SIGSTOP)
        end = await gateway.end(0)
        assert isinstance(end, wire.Failed)
        assert "silent" in end.message
        before = gateway.messages[: gateway.messages.index(step_with(gateway, end))]
        reports = [message for message in before if isinstance(message, wire.Report)]
        down = [one.state for one in reports if one.engines and one.engines[0].state == "down"]
        assert set(down) == {"suspect"}
        await until(lambda: node.engines[0].info is not None and node.pid() != pid, "another one")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def step_with(gateway: FakeGateway, end: wire.Finished | wire.Failed) -> wire.Step:
    return next(step for step in gateway.of(wire.Step) if end in step.rare)


async def test_a_stopped_engine_that_goes_on_is_ready_again(start_node: StartNode) -> None:
    timing = EngineTiming(up_s=30, silent_s=1.5, kill_s=30, watch_s=0.05)
    async with (
        FakeGateway().listening() as gateway,
        start_node(gateway, timing=timing).running() as node,
    ):
        await gateway.engines()
        os.kill(node.pid(), signal.SIGSTOP)
        try:
            await until(lambda: node.engines[0].is_silent, "silence")
        finally:
            os.kill(node.pid(), signal.SIGCONT)
        await until(lambda: not node.engines[0].is_silent, "news again")
        await gateway.send(submit("r"))
        assert isinstance(await gateway.end(0), wire.Finished)


async def test_an_agent_that_was_stopped_itself_does_not_kill_its_engine(
    start_node: StartNode,
) -> None:
    timing = EngineTiming(up_s=30, silent_s=5, kill_s=20, watch_s=0.05)
    async with (
        FakeGateway().listening() as gateway,
        start_node(gateway, timing=timing).running() as node,
    ):
        await gateway.engines()
        await until(lambda: node.node._reports, "news; the next come a second later")
        pid = node.pid()
        jumped = time.monotonic() + 100  # what the clock says when SIGSTOP is over
        node.engines[0]._clock = lambda: jumped
        await asyncio.sleep(0.3)
        assert node.pid() == pid
        assert not node.engines[0].is_silent
        await gateway.send(submit("r"))
        assert isinstance(await gateway.end(0), wire.Finished)


# --- drain ---------------------------------------------------------------------------------------


async def test_a_gateway_drains_a_node_and_wakes_it(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running():
        await gateway.engines()
        await gateway.send(submit("r", "slow"), wire.Drain(True), submit("s", lanes=(1,)))
        refused = await gateway.end(1)
        assert isinstance(refused, wire.Failed)
        assert refused.code == "node_draining"
        await gateway.first(wire.Draining)
        await until(lambda: gateway.of(wire.Report)[-1].state == "draining", "draining")
        assert not gateway.ends(0)  # what runs goes on
        await gateway.send(wire.Drain(False), submit("t", lanes=(2,)))
        assert isinstance(await gateway.end(2), wire.Finished)
        assert gateway.of(wire.Report)[-1].state == "ready"


async def test_a_role_is_set_told_and_kept_over_a_cut_link(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running():
        await gateway.engines()
        assert (await gateway.first(wire.Hello)).role == "mixed"
        assert (await gateway.first(wire.Report)).role == "mixed"
        await gateway.send(submit("r", "slow"), wire.SetRole("prefill"))
        await until(lambda: gateway.of(wire.Report)[-1].role == "prefill", "the role")
        await until(lambda: gateway.tokens(0), "what runs goes on")
        gateway.cut()
        await until(lambda: gateway.links == 2 and gateway.of(wire.Hello), "another Hello")
        assert gateway.of(wire.Hello)[0].role == "prefill"


async def test_stopping_finishes_what_runs(start_node: StartNode) -> None:
    async with FakeGateway().listening() as gateway, start_node(gateway).running() as node:
        await gateway.engines()
        await gateway.send(submit("r", "slow", max_tokens=30))
        await until(lambda: gateway.tokens(0), "a token")
        node.stop.ask()
        await gateway.first(wire.Draining)
        await gateway.send(wire.Drain(False))  # nobody undoes it
        end = await gateway.end(0)
        assert isinstance(end, wire.Finished)
        assert len(gateway.tokens(0)) == 30
        await until(lambda: node.is_over, "the end")
        assert node.engines[0].pid is None
        await until(lambda: gateway.close_code == 1001, "a clean close")


async def test_the_drain_deadline_holds(start_node: StartNode) -> None:
    async with (
        FakeGateway().listening() as gateway,
        start_node(gateway, drain_s=0.3).running() as n,
    ):
        await gateway.engines()
        await gateway.send(submit("r", "slow"))
        await until(lambda: gateway.tokens(0), "a token")
        n.stop.ask()
        await until(lambda: n.is_over, "the end")
        assert not any(isinstance(end, wire.Finished) for end in gateway.ends(0))
