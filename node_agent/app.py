"""The composition root of a node agent: models, engines, links, and an orderly end."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from engine.config import ModelSpec
from engine.cores import own_cores
from node_agent.catalogue import load_catalogue
from node_agent.checkpoints import PreparedModel, ensure, models_folder, prepare, resolve
from node_agent.config import NodeConfig
from node_agent.disk import locked
from node_agent.errors import NodeError
from node_agent.identity import Identity, begin_epoch, node_id_of
from node_agent.link import GatewayLink, LinkTiming
from node_agent.models_command import bundle_caches
from node_agent.node import Node
from node_agent.stages import Emit, EngineStages, StageLines, stage
from node_agent.supervisor import EngineSupervisor, EngineTiming, engine_command
from node_agent.tiers import tier_flags
from policies.contract.bundle import bundle_digest, decode_bundle, tokenizer_digest
from policies.cores import threads_each

REPORT_S = 1.0
PARENT_S = 0.5
PROGRESS_S = 2.0
FLUSH_S = 1.0  # after the last stream: for its frames and their acknowledgement
POLL_S = 0.05


class Stopped(Exception):
    """A signal came while the models were being made ready."""


class StopSignals:
    """The first SIGTERM or SIGINT asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self.flag = threading.Event()  # for threads

    def listen(self) -> None:
        """From now on signals do it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)

    def ask(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()
        self.flag.set()

    def insist(self) -> None:
        self.asked.set()
        self.insisted.set()
        self.flag.set()


async def serve(
    config: NodeConfig,
    *,
    emit: Emit,
    engine_timing: EngineTiming | None = None,
    link_timing: LinkTiming | None = None,
    make_engine_command: Callable[[tuple[str, ...]], tuple[str, ...]] = engine_command,
) -> int:
    """Runs until it is told to stop; returns the exit code. Raises NodeError when it cannot run."""
    begun = time.monotonic()
    stop = StopSignals()
    stop.listen()
    node_id = node_id_of(config.home, config.node_id, lambda: f"n-{os.urandom(4).hex()}")
    with locked(config.home / "nodes" / node_id / "lock", timeout_s=0):
        identity = begin_epoch(config.home, node_id, wall_s=time.time())
        structlog.contextvars.bind_contextvars(node=node_id)
        try:
            models = await asyncio.to_thread(prepare_models, config, emit, stop.flag)
        except Stopped:
            return 0
        node, engines, links = compose(
            config,
            identity,
            models,
            emit=emit,
            begun=begun,
            engine_timing=engine_timing or EngineTiming(up_s=config.engine_up_s),
            link_timing=link_timing,
            make_engine_command=make_engine_command,
        )
        await run_until_stopped(config, node, engines, links, stop)
    return 0


def compose(
    config: NodeConfig,
    identity: Identity,
    models: list[PreparedModel],
    *,
    emit: Emit,
    begun: float,
    engine_timing: EngineTiming,
    link_timing: LinkTiming | None,
    make_engine_command: Callable[[tuple[str, ...]], tuple[str, ...]],
) -> tuple[Node, list[EngineSupervisor], list[GatewayLink]]:
    """All objects, wired; nothing runs yet."""

    def on_ready() -> None:
        names = [model.spec.name for model in models]
        emit(
            {
                "event": "ready",
                "node_id": identity.node_id,
                "models": names,
                "gateways": [link.url for link in links if link.is_open],
                "seconds": round(time.monotonic() - begun, 3),
            }
        )

    stages = EngineStages(emit, [model.spec.name for model in models], time.monotonic)
    node = Node(
        identity,
        config.role,
        bundles={model.spec.bundle_digest: model.bundle for model in models},
        clock=time.monotonic,
        on_ready=on_ready,
        on_engine_up=stages.on_up,
        on_engine_loading=stages.on_loading,
    )
    threads = config.threads or threads_each(own_cores(), len(models))
    engines = [
        EngineSupervisor(
            index,
            make_engine_command(engine_arguments(config, index, model, threads, identity.node_id)),
            listener=node,
            clock=time.monotonic,
            timing=engine_timing,
        )
        for index, model in enumerate(models)
    ]
    links = [
        GatewayLink(
            index,
            url,
            config.join_token,
            owner=node,
            jitter=random.random,
            timing=link_timing,
        )
        for index, url in enumerate(config.gateway_urls)
    ]
    node.engines, node.links = engines, links
    return node, engines, links


def engine_arguments(
    config: NodeConfig, index: int, model: PreparedModel, threads: int, node_id: str
) -> tuple[str, ...]:
    script: tuple[str, ...] = ()
    if config.script is not None:
        script = ("--script", str(config.script), "--bundle", str(model.bundle_path))
    return (
        *("--engine-index", str(index)),
        *("--model-spec", msgspec.json.encode(model.spec).decode()),
        *("--threads", str(threads)),
        *config.engine_flags,
        *tier_flags(config, node_id, model.spec.name),
        *peer_flags(config, index),
        *script,
    )


def peer_flags(config: NodeConfig, index: int) -> tuple[str, ...]:
    """Where the engine of this index is found by others."""
    port = config.peer_port + index if config.peer_port else config.peer_port
    return ("--peer-host", config.peer_host, "--peer-port", "none" if port is None else str(port))


def prepare_models(
    config: NodeConfig, emit: Emit, stop: threading.Event | None = None
) -> list[PreparedModel]:
    """Checkpoints and bundles of all models. Blocks; raises Stopped soon after stop is set."""
    if config.bundle is not None:
        return [scripted_model(config.models[0] if config.models else "scripted", config.bundle)]
    catalogue, folder = load_catalogue(), models_folder()
    progress = _ProgressLines(emit, stop)
    prepared = []
    for name in config.models or (catalogue.default,):
        if stop is not None and stop.is_set():
            raise Stopped
        checkpoint = resolve(name, catalogue, folder)
        with stage(emit, "checkpoint", checkpoint.path.name):
            checkpoint = ensure(checkpoint, progress=progress)
        with stage(emit, "bundle", checkpoint.name):
            prepared.append(prepare(checkpoint, bundle_caches=bundle_caches(folder, config.home)))
    return prepared


def scripted_model(name: str, bundle_file: Path) -> PreparedModel:
    """A model that is only a tokenizer: the engine plays a script."""
    try:
        encoded = bundle_file.read_bytes()
        bundle = decode_bundle(encoded)
    except (OSError, msgspec.MsgspecError) as error:
        raise NodeError(
            "--bundle",
            found=str(error),
            allowed="a tokenizer bundle file",
            remedy="make one: python -m node_agent models spec NAME",
        ) from error
    digest = bundle_digest(encoded)
    spec = ModelSpec(
        name=name,
        identity=f"{name}@{digest[:16]}",
        path="",
        format="gguf",
        context_tokens=bundle.context_tokens,
        page_size=bundle.page_size,
        tokenizer_digest=tokenizer_digest(bundle.tokenizer_json),
        bundle_digest=digest,
        labels=bundle.labels,
    )
    return PreparedModel(spec, bundle_file, encoded)


class _ProgressLines:
    """Bytes of a pull on stdout, a line each PROGRESS_S; raises Stopped out of it."""

    def __init__(self, emit: Emit, stop: threading.Event | None) -> None:
        self._emit = emit
        self._stop = stop
        self._said_at = 0.0
        self._name = ""

    def __call__(self, name: str, done: int, total: int) -> None:
        if self._stop is not None and self._stop.is_set():
            raise Stopped
        now = time.monotonic()
        is_end = 0 < total <= done
        if name == self._name and not is_end and now - self._said_at < PROGRESS_S:
            return
        self._name, self._said_at = name, now
        self._emit(
            {
                "event": "progress",
                "stage": name,
                "bytes": done,
                "total_bytes": total,
                "detail": f"{done >> 20} of {total >> 20} MiB" if total else "",
            }
        )


async def run_until_stopped(
    config: NodeConfig,
    node: Node,
    engines: list[EngineSupervisor],
    links: list[GatewayLink],
    stop: StopSignals,
) -> None:
    """Owns every task; returns when all have ended. Raises NodeError if an engine cannot start."""
    try:
        async with asyncio.TaskGroup() as tasks:
            owned = [tasks.create_task(engine.run()) for engine in engines]
            owned += [tasks.create_task(link.run()) for link in links]
            owned.append(tasks.create_task(_each_second(node)))
            if config.exit_with_parent:
                owned.append(tasks.create_task(_watch_parent(stop)))
            await stop.asked.wait()
            await _drain(node, links, stop, config.drain_s)
            if stop.insisted.is_set():
                for engine in engines:
                    engine.kill()
            for task in owned:
                task.cancel()
    # Before Python 3.11.4 `except*` wraps what is raised in it in a group of one.
    except BaseExceptionGroup as group:
        if group.split(NodeError)[1] is not None:
            raise
        raise group.exceptions[0] from None


async def _each_second(node: Node) -> None:
    while True:
        node.report()
        node.resend_overdue()
        await asyncio.sleep(REPORT_S)


async def _watch_parent(stop: StopSignals) -> None:
    """Who started us is gone when we have another parent: nobody is left to tell us to stop."""
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110  nothing announces it
        await asyncio.sleep(PARENT_S)
    structlog.get_logger().warning("parent_gone")
    stop.insist()


async def _drain(node: Node, links: list[GatewayLink], stop: StopSignals, drain_s: float) -> None:
    """Finish what runs, then see that the gateways have it all."""
    node.drain("stopping", for_good=True)
    await _until(lambda: not len(node.streams), stop, drain_s)
    if stop.insisted.is_set():
        return
    for engine in node.engines:
        engine.drain()
    await asyncio.gather(*(link.flushed(FLUSH_S) for link in links))
    await _until(lambda: not any(link.is_open and len(link.usage) for link in links), stop, FLUSH_S)


async def _until(is_done: Callable[[], bool], stop: StopSignals, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_done() and time.monotonic() < deadline:
        try:
            await asyncio.wait_for(stop.insisted.wait(), POLL_S)
        except TimeoutError:
            continue
        return


def run_node(config: NodeConfig) -> int:
    """Exit code of the process: 0 after a drain, 1 when it could not run."""
    emit = StageLines()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(config, emit=emit))
    except NodeError as error:
        emit({"event": "error", "error": error.as_dict()})
        structlog.get_logger().error("cannot_run", **error.as_dict())
        return 1


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
