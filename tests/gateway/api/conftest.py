"""A real gateway on real sockets in a thread of its own, with a scripted node on its link."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.app import Addresses, build, running
from gateway.config import GatewayConfig, LimitsConfig, ServerConfig, StreamConfig
from gateway.ledger import ledger as ledger_module
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.verify import verify
from gateway.services import Services
from gateway.telemetry import make_log
from policies.contract.wire import WIRE_VERSION, Compute, Role

KEY = "test-key-0123456789abcdef"
ROOT = Path(__file__).parents[3]
DISK_S = 60.0  # for the ledger's answers, on a machine that is busy
OTHER_KEY = "other-key-0123456789abcd"


def _load_node_module() -> ModuleType:
    path = Path(__file__).with_name("scripted_node.py")
    spec = importlib.util.spec_from_file_location("scripted_node", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scripted_node"] = module
    spec.loader.exec_module(module)
    return module


scripted_node = _load_node_module()

QUICK = GatewayConfig(
    server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=3.0),
    limits=LimitsConfig(request_deadline_s=20.0),
    stream=StreamConfig(first_heartbeat_s=0.3, heartbeat_s=0.2, send_stall_s=5.0),
)


@dataclass
class RunningGateway:
    services: Services
    addresses: Addresses
    nodes: dict[str, Any]
    log: StringIO
    loop: asyncio.AbstractEventLoop
    stop: Callable[[], None]
    thread: threading.Thread = field(repr=False)

    @property
    def node(self) -> Any:
        return next(iter(self.nodes.values()))

    @property
    def url(self) -> str:
        return self.addresses.url

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self, *, http2: bool = False, key: str = KEY) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"},
            http1=not http2,
            http2=http2,
            timeout=20,
            trust_env=False,
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def raw(self, body: bytes, *, path: str = "/v1/chat/completions", extra: str = "") -> bytes:
        """A whole HTTP/1.1 request as bytes."""
        return (
            f"POST {path} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        ).encode() + body

    def call(self, work: Callable[[], Any]) -> Any:
        """Run work in the gateway's loop and return its result."""

        async def wrapped() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(20)

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Nothing admitted or reserved, no row open, no lane in use; else say what is left."""
        deadline = time.monotonic() + seconds
        while True:
            left = self.call(self._left)
            if not any(left.values()):
                return
            assert time.monotonic() < deadline, {name: n for name, n in left.items() if n}
            time.sleep(0.02)

    def wait_settled(self) -> None:
        """Nothing failed in silence, all was given back, every row settled, the books balance."""
        self.wait_idle()
        assert [line for line in self.log_lines() if line["event"] == "handler_failed"] == []
        checked = verify(self.services.home.folder / LEDGER_NAME)
        assert (checked.problems, checked.open_rows) == ((), 0)

    def _left(self) -> dict[str, object]:
        services = self.services
        health = services.ledger.health()
        return {
            "in_flight": services.admission.in_flight,
            "reserved_tokens": services.admission.reserved_tokens,
            "body_bytes": services.body_budget.held_bytes,
            "open_rows": health.open_rows,
            "idempotent_runs": services.idempotency.num_running,
            "unsettled": health.unsettled,
            "node_in_flight": sum(node.in_flight for node in services.fleet.nodes()),
            "node_tasks": sum(len(node.tasks) for node in self.nodes.values()),
        }


async def _nodes_ready(services: Services, count: int) -> None:
    async with asyncio.timeout(60):
        while [n.state for n in services.fleet.nodes()].count("ready") < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextmanager
def start_gateway(
    home: Path,
    config: GatewayConfig = QUICK,
    *,
    nodes: int = 1,
    models: Any = None,
    wire_version: int = WIRE_VERSION,
    compute: Compute = "exact",
    roles: Sequence[Role] = (),
) -> Iterator[RunningGateway]:
    """Up to ready, and down again with nothing left behind. roles: of n1, n2 and so on."""
    config = msgspec.structs.replace(config, home=str(home))
    ready: list[RunningGateway] = []
    failed: list[BaseException] = []
    up = threading.Event()
    log = StringIO()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        async with build(config, api_keys=(KEY, OTHER_KEY), log=make_log(log)) as services:
            services.ledger_reader._deadline_s = DISK_S
            made = {}
            handovers: dict[bytes, int] = {}
            for number, role in enumerate(roles or ["mixed"] * nodes, start=1):
                node = scripted_node.ScriptedNode(
                    f"n{number}", wire_version=wire_version, compute=compute
                )
                node.role, node.handovers = role, handovers
                if models is not None:
                    node.models = models
                made[node.node_id] = node
            async with running(services) as addresses:
                tasks = [
                    asyncio.create_task(node.run(addresses.link_url, services.home.join_token))
                    for node in made.values()
                ]
                await _nodes_ready(services, len(made))
                ready.append(
                    RunningGateway(
                        services,
                        addresses,
                        made,
                        log,
                        loop,
                        lambda: loop.call_soon_threadsafe(ended.set),
                        threading.current_thread(),
                    )
                )
                up.set()
                await ended.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def thread_main() -> None:
        try:
            uvloop.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=thread_main, daemon=True)
    thread.start()
    assert up.wait(60), "the gateway did not start in 60 s"
    if failed:
        raise failed[0]
    gateway = ready[0]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ledger_module, "OPEN_DEADLINE_S", DISK_S)
            yield gateway
    finally:
        gateway.stop()
        thread.join(20)
        assert not thread.is_alive(), "the gateway did not stop in 20 s"
    if failed:
        raise failed[0]


def run_cases(cases: st.SearchStrategy[Any], check: Callable[[Any], None], *, count: int) -> int:
    """check each of so many; how many there were."""
    checked = 0

    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(case=cases)
    def checking(case: Any) -> None:
        nonlocal checked
        checked += 1
        check(case)

    checking()
    return checked


@dataclass
class FuzzCount:
    """Cases that the full counts ran, told at the end of the session."""

    started: float = field(default_factory=time.monotonic)
    cases_by_name: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, cases: int) -> None:
        self.cases_by_name[name] = cases

    def lines(self) -> list[str]:
        seconds = time.monotonic() - self.started
        total = sum(self.cases_by_name.values())
        told = [f"  {cases:6} {name}" for name, cases in self.cases_by_name.items()]
        return [f"{total} fuzz cases in {seconds:.0f} s:", *told] if told else []


FUZZ_COUNT = pytest.StashKey[FuzzCount]()


@pytest.fixture(scope="session")
def fuzz_count(request: pytest.FixtureRequest) -> FuzzCount:
    return request.config.stash.setdefault(FUZZ_COUNT, FuzzCount())


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The total of all files, where nothing captures it."""
    if FUZZ_COUNT in config.stash:
        for line in config.stash[FUZZ_COUNT].lines():
            terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with start_gateway(tmp_path_factory.mktemp("home")) as running_gateway:
        yield running_gateway


@pytest.fixture(scope="module")
def shared_caller_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """`tiny` as everywhere, and `caller`, which knows tools as the default model does."""
    template = ROOT / "policies" / "defaults" / "templates" / "smollm2.jinja"
    make_bundle = scripted_node.make_bundle
    models = {
        "tiny": make_bundle(),
        "caller": make_bundle(chat_template=template.read_text(), parser_family="hermes"),
    }
    patient = LimitsConfig(body_grace_s=30.0, request_deadline_s=60.0)  # on a machine that is busy
    config = msgspec.structs.replace(QUICK, limits=patient)
    with start_gateway(tmp_path_factory.mktemp("home"), config, models=models) as running_gateway:
        yield running_gateway


@pytest.fixture
def gateway(shared_gateway: RunningGateway) -> Iterator[RunningGateway]:
    """The one of the module; after each test everything must have been given back."""
    shared_gateway.node.served.clear()
    shared_gateway.node.resident.clear()
    shared_gateway.node.opened.clear()
    yield shared_gateway
    shared_gateway.wait_idle()


@pytest.fixture(scope="session")
def start_once() -> Callable[..., Any]:
    """`start`, for a gateway that a module shares."""
    return start_gateway


@pytest.fixture
def start() -> Callable[..., Any]:
    """start(home, config, nodes=…): a gateway with settings of the test's own."""
    return start_gateway


@pytest.fixture
def ask() -> Callable[..., dict[str, Any]]:
    """A chat body whose last message is the node's script."""

    def make(script: dict[str, Any] | str = "hello", **fields: Any) -> dict[str, Any]:
        text = script if isinstance(script, str) else json.dumps(script, ensure_ascii=False)
        return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}

    return make
