"""A gateway of the tests that speaks the real wire, and a node in the test's own loop."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import structlog
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from node_agent.app import StopSignals, compose, run_until_stopped, scripted_model
from node_agent.config import NodeConfig
from node_agent.identity import Identity
from node_agent.link import LinkTiming
from node_agent.supervisor import EngineTiming, engine_command
from policies.contract import wire
from policies.contract.bundle import Bundle, encode_bundle

TOKEN = "join-token-of-the-tests"
DEADLINE_S = 30.0  # however busy the machine is
QUICK_LINK = LinkTiming(welcome_s=60.0, backoff_s=0.05, backoff_cap_s=0.2)
M = TypeVar("M")


async def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits for the condition; an AssertionError names what never came."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s} s"
        await asyncio.sleep(0.01)


class FakeGateway:
    """Records every message; answers Hello with `welcome`; `send` speaks on the newest link."""

    def __init__(self) -> None:
        self.port = 0
        self.links = 0
        self.messages: list[Any] = []  # of the newest link
        self.welcome: Any = wire.Welcome(wire.WIRE_VERSION, "g1")
        self.credentials: list[str | None] = []
        self.welcome_at_once = asyncio.Event()
        self.welcome_at_once.set()
        self.is_reading = True
        self.close_code: int | None = None
        self._socket: ServerConnection | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/link/v1"

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[FakeGateway]:
        async with serve(
            self._on_link, "127.0.0.1", port, compression=None, max_size=16 << 20, close_timeout=1
        ) as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            yield self

    async def _on_link(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        self.credentials.append(socket.request.headers.get("Authorization"))
        self.messages = messages = []
        self.links += 1
        try:
            hello = wire.decode_from_node(await socket.recv(decode=False))
            messages.append(hello)
            await self.welcome_at_once.wait()
            await socket.send(wire.encode(self.welcome))
            self._socket = socket
            if not self.is_reading:
                socket.transport.pause_reading()
            async for data in socket:
                messages.append(wire.decode_from_node(data))  # noqa: PERF401  seen as they come
        except ConnectionClosed:
            return  # how a link ends is the node's matter
        finally:
            self.close_code = socket.close_code

    async def send(self, *messages: Any) -> None:
        assert self._socket is not None
        for message in messages:
            data = message if isinstance(message, bytes) else wire.encode(message)
            await self._socket.send(data)

    def cut(self) -> None:
        """As a power failure would."""
        assert self._socket is not None
        self._socket.transport.abort()

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]

    async def first(self, kind: type[M], deadline_s: float = DEADLINE_S) -> M:
        await until(lambda: self.of(kind), f"a {kind.__name__}", deadline_s)
        return self.of(kind)[0]

    def tokens(self, lane: int) -> list[int]:
        return [
            token
            for step in self.of(wire.Step)
            for at, token in zip(step.lanes, step.tokens, strict=True)
            if at == lane
        ]

    def ends(self, lane: int) -> list[wire.Finished | wire.Failed]:
        return [
            rare
            for step in self.of(wire.Step)
            for rare in step.rare
            if rare.lane == lane and not isinstance(rare, wire.Started)
        ]

    async def end(self, lane: int, deadline_s: float = DEADLINE_S) -> wire.Finished | wire.Failed:
        await until(lambda: self.ends(lane), f"the end of lane {lane}", deadline_s)
        return self.ends(lane)[0]

    async def engines(self, deadline_s: float = DEADLINE_S) -> tuple[wire.EngineInfo, ...]:
        """Waits until an engine is announced."""

        def known() -> tuple[wire.EngineInfo, ...]:
            lists = [m.engines for m in self.messages if isinstance(m, CARRY_ENGINES)]
            return lists[-1] if lists else ()

        await until(known, "an engine", deadline_s)
        return known()

    def resident(self, engine: int = 0) -> set[bytes]:
        """What page events say; a gap raises."""
        keys: set[bytes] = set()
        due: int | None = None
        for frame in self.of(wire.PageEvents):
            if frame.engine != engine:
                continue
            assert frame.snapshot or due is None or frame.first == due, "a gap in page events"
            due = frame.first + len(frame.events)
            for event in frame.events:
                match event:
                    case wire.PageStored(page_key=key):
                        keys.add(key)
                    case wire.PageRemoved(page_key=key):
                        keys.discard(key)
                    case wire.CacheCleared():
                        keys.clear()
        return keys


CARRY_ENGINES = (wire.Hello, wire.EnginesChanged)


def byte_bundle(folder: Path, *, filler: int = 0) -> Path:
    """A bundle of 256 byte tokens and three specials; filler bytes make it larger."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    )
    bundle = Bundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template="x" * filler,
        bos_token=None,
        eos_token="<|im_end|>",
        stop_token_ids=(257,),
        add_bos=False,
        context_tokens=4096,
        page_size=16,
        vocab_size=258,
    )
    file = folder / "bytes.bundle"
    file.write_bytes(encode_bundle(bundle))
    return file


SCRIPT = [
    {"if": "^slow", "say": "abcdefghij" * 40, "delay_ms": 20},
    {"if": "^die", "say": "abcdefghij", "delay_ms": 10, "die_after": 3},
    {"if": "^hello", "say": "good day"},
]


def prompt_of(text: str) -> array[int]:
    """Ids of ASCII text in byte_bundle's vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {c: i for i, c in enumerate(alphabet)}
    return array("I", [table["Ġ" if c == " " else c] for c in text])


def submit(
    request_id: str,
    text: str = "hello",
    *,
    lanes: tuple[int, ...] = (0,),
    attempt: int = 0,
    engine: int = 0,
    max_tokens: int = 1000,
    deadline_s: float = 60.0,
) -> wire.Submit:
    return wire.Submit(
        request_id=request_id,
        attempt=attempt,
        engine=engine,
        lanes=lanes,
        prompt=wire.pack_ids(prompt_of(text)),
        salt=bytes(32),
        sampling=wire.Sampling(max_tokens, temperature=0.0, stop_token_ids=(257,)),
        deadline_s=deadline_s,
    )


def info(index: int) -> wire.EngineInfo:
    return wire.EngineInfo(
        index, f"m{index}", "i", 100, 16, 8, "b", "t", "l", "w", "bf16", "bf16", "exact", 64
    )


class RunningNode:
    """A node in this loop; its engines are real processes."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        engine_timing: EngineTiming,
        link_timing: LinkTiming,
        command: Callable[[tuple[str, ...]], tuple[str, ...]],
    ) -> None:
        assert config.bundle is not None
        self.lines: list[dict[str, object]] = []
        self.config = config
        names = config.models or ("scripted",)
        self.node, self.engines, self.links = compose(
            config,
            Identity("n1", 7),
            [scripted_model(name, config.bundle) for name in names],
            emit=self.lines.append,
            begun=time.monotonic(),
            engine_timing=engine_timing,
            link_timing=link_timing,
            make_engine_command=command,
        )
        self.stop = StopSignals()
        self.is_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RunningNode]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run())
            try:
                yield self
            finally:
                self.stop.insist()

    async def _run(self) -> None:
        await run_until_stopped(self.config, self.node, self.engines, self.links, self.stop)
        self.is_over = True

    def pid(self, engine: int = 0) -> int:
        pid = self.engines[engine].pid
        assert pid is not None
        return pid


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Errors only; what other tests have configured comes back."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.configure(**before)


StartNode = Callable[..., RunningNode]


@pytest.fixture
def bundle_file(tmp_path: Path) -> Path:
    return byte_bundle(tmp_path)


@pytest.fixture
def script_file(tmp_path: Path) -> Path:
    file = tmp_path / "script.json"
    file.write_bytes(msgspec.json.encode(SCRIPT))
    return file


@pytest.fixture
def start_node(tmp_path: Path, bundle_file: Path, script_file: Path) -> StartNode:
    """start_node(gateway, …, timing=…, models=…).running() is a node with scripted engines."""

    def start(
        *gateways: FakeGateway,
        timing: EngineTiming | None = None,
        models: tuple[str, ...] = (),
        bundle: Path | None = None,
        command: Callable[[tuple[str, ...]], tuple[str, ...]] = engine_command,
        drain_s: float = 5.0,
        link_timing: LinkTiming = QUICK_LINK,
    ) -> RunningNode:
        config = NodeConfig(
            gateway_urls=tuple(gateway.url for gateway in gateways),
            join_token=TOKEN,
            models=models,
            home=tmp_path,
            script=script_file,
            bundle=bundle or bundle_file,
            threads=1,
            drain_s=drain_s,
        )
        default = EngineTiming(up_s=30, backoff_s=0.05, backoff_cap_s=0.2, watch_s=0.05)
        return RunningNode(
            config,
            engine_timing=timing or default,
            link_timing=link_timing,
            command=command,
        )

    return start
