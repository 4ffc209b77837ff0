"""A node without a network: reads the fleet's out-queue, remembers lanes, makes frames."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any, cast

from gateway.nodes.bundles import Bundles
from gateway.nodes.fleet import Fleet, FleetConfig
from gateway.nodes.session import Session
from gateway.nodes.streams import Dispatch
from policies.contract import wire

DIGEST = hashlib.sha256(b"bundle").hexdigest()
SALT = bytes(32)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def bundles(*digests: str) -> Bundles:
    """Bundles whose text models are plain objects: the fleet only passes them on."""
    made = Bundles(lambda bundle: cast(Any, bundle))
    for digest in digests or (DIGEST,):
        made.put(digest, cast(Any, f"text of {digest[:4]}"))
    return made


def info(engine: int = 0, model: str = "m", **changes: Any) -> wire.EngineInfo:
    fields: dict[str, Any] = {
        "identity": "id",
        "context_tokens": 4096,
        "page_size": 64,
        "num_pages": 1000,
        "bundle_digest": DIGEST,
        "tokenizer_digest": "t",
        "layout_id": "l",
        "weights_digest": "w",
        "weights_precision": "bf16",
        "kv_precision": "bf16",
        "compute": "exact",
        "step_tokens": 512,
        "prefill_tokens_per_s": 1000.0,
    }
    return wire.EngineInfo(engine=engine, model=model, **(fields | changes))


def keys(*names: int) -> list[bytes]:
    """Page keys, one per name."""
    return [hashlib.sha256(name.to_bytes(4, "little")).digest() for name in names]


def request(number: int, tokens: int = 100, **changes: Any) -> Dispatch:
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "tenant": "default",
        "model": "m",
        "prompt": array("I", range(tokens)),
        "page_keys": keys(*range(tokens // 64)),
        "salt": SALT,
        "sampling": wire.Sampling(max_tokens=10),
        "deadline_s": 60.0,
        "affinity_key": None,
    }
    return Dispatch(**(fields | changes))


class FakeNode:
    """One node process: `join` links it, `read` takes what the gateway sent."""

    def __init__(
        self,
        fleet: Fleet,
        node_id: str,
        *infos: wire.EngineInfo,
        epoch: int = 1,
        version: int = wire.WIRE_VERSION,
        role: wire.Role = "mixed",
    ) -> None:
        self.fleet = fleet
        self.node_id = node_id
        self.infos = infos or (info(),)
        self.epoch = epoch
        self.version = version
        self.role = role
        self.session: Session | None = None
        self.received: list[Any] = []
        self.request_by_lane: dict[int, tuple[str, int]] = {}
        self.aborted: set[int] = set()
        self.given: set[int] = set()  # lanes of this link, ended ones too
        self.step_number = 0
        self.report_number = 0

    def hello(self) -> wire.Hello:
        return wire.Hello(
            self.version,
            wire.MIN_WIRE_VERSION,
            self.node_id,
            self.epoch,
            self.role,
            tuple(self.infos),
        )

    def join(self) -> FakeNode:
        session = self.fleet.attach(self.hello())
        assert isinstance(session, Session), session
        self.session = session
        self.request_by_lane = {}
        self.aborted = set()
        self.given = set()
        self.read()
        return self

    def read(self) -> list[Any]:
        """Take and obey what the gateway sent; returns the new messages."""
        assert self.session is not None
        new: list[Any] = []
        while (frame := self.session.outbox.pop()) is not None:
            message = wire.decode_from_gateway(frame)
            new.append(message)
            match message:
                case wire.Submit(request_id, attempt, _, lanes):
                    for lane in lanes:
                        assert lane not in self.request_by_lane, "a lane was given twice"
                        self.request_by_lane[lane] = (request_id, attempt)
                        self.given.add(lane)
                case wire.Abort(lanes):
                    for lane in lanes:
                        self._told_to_end(lane)
                case wire.FinishLane(lane):
                    self._told_to_end(lane)
                case wire.SetRole(role):
                    self.role = role
        self.received += new
        return new

    def _told_to_end(self, lane: int) -> None:
        assert lane in self.given, "an end overtook its submit"
        if lane in self.request_by_lane:  # else it had ended by itself meanwhile
            self.aborted.add(lane)

    def send(self, message: Any) -> None:
        assert self.session is not None
        self.fleet.receive(self.session, wire.encode(message))

    def step(
        self,
        lanes: list[int],
        tokens: list[int] | None = None,
        rare: list[Any] | None = None,
        computed: list[tuple[int, int]] | None = None,
    ) -> None:
        self.step_number += 1
        tokens = tokens or [7] * len(lanes)
        self.send(wire.Step(0, self.step_number, lanes, tokens, rare or [], computed or []))

    def start(self, lane: int, cached: int = 0) -> None:
        self.step([lane], rare=[wire.Started(lane, cached)])

    def end(self, lane: int, reason: wire.FinishReason = "stop") -> None:
        usage = wire.Usage(100, 0, 1)
        self.request_by_lane.pop(lane, None)
        self.aborted.discard(lane)
        self.step([], rare=[wire.Finished(lane, reason, usage)])

    def fail(self, lane: int, code: str) -> None:
        self.request_by_lane.pop(lane, None)
        self.aborted.discard(lane)
        self.step([], rare=[wire.Failed(lane, code, "as the test wants")])

    def report(self, node_state: wire.NodeState = "ready", **changes: Any) -> None:
        """changes: of its engines' reports."""
        self.report_number += 1
        engines = tuple(
            wire.EngineReport(one.engine, **({"state": "ready"} | changes)) for one in self.infos
        )
        self.send(wire.Report(self.epoch, self.report_number, node_state, engines, role=self.role))

    def cut(self) -> None:
        assert self.session is not None
        self.fleet.detach(self.session, "cut")

    def lanes(self) -> list[int]:
        """Lanes the node works on."""
        self.read()
        return list(self.request_by_lane)


def fleet(clock: Clock | None = None, **changes: Any) -> Fleet:
    config = FleetConfig(**changes) if changes else None
    return Fleet(bundles(), config, clock=clock or Clock())
