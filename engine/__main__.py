"""`python -m engine serve`: read the flags, load a runner, say EngineUp, run the loop."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec

from engine import config as settings
from engine.config import ConfigError, EngineConfig, ModelSpec, ScheduleConfig, read_peer_port
from engine.cores import own_cores
from engine.engine import Engine
from engine.framing import AGENT_CHANNEL
from engine.memory import available_bytes
from engine.process import Connection, run
from engine.schedule.plan import Runner
from engine.schedule.scheduler import Scheduler
from engine.store.opening import OpenTiers, open_tiers
from engine.store.page_kind import page_kind
from policies.contract import wire
from policies.contract.bundle import Bundle, decode_bundle
from policies.contract.page_keys import interchangeable_id

if TYPE_CHECKING:
    from engine.execute.runner import ModelRunner
    from engine.store.page_codec import PageLayout
    from engine.store.tiered import PageMemory
    from engine.transfer.mover import TransferMover

# OpenMP threads that wait spin this many rounds before they sleep. Measured in docs/decisions.md:
# endless spinning starves neighbours on shared cores, sleeping at once halves decode.
SPIN_COUNT = "3000"

EXIT_BAD_CONFIG = 2
EXIT_CANNOT_LOAD = 4


class CannotLoad(Exception):
    """The checkpoint is not what the engine can serve; the message says why in four parts."""


@dataclass(frozen=True)
class Loaded:
    """A runner, and what the fleet must know of it."""

    runner: Runner
    context_tokens: int
    vocab_size: int
    layout_id: str
    weights_digest: str
    weights_precision: str
    kv_precision: str
    prefill_tokens_per_s: float | None  # None: not measured
    page_bytes: int = 0
    page_kind: str = ""
    # None: its pages have no bytes to keep, or to send.
    open_tiers: Callable[[], OpenTiers] | None = None
    open_mover: Callable[[Callable[[], None]], TransferMover] | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        config = read_config(options)
    except ConfigError as error:
        sys.stderr.write(f"engine: {error}\n")
        return EXIT_BAD_CONFIG
    return serve(config, socket.socket(fileno=options.fd))


def serve(config: EngineConfig, sock: socket.socket) -> int:
    """Load, warm, announce and run; returns the process's exit code."""
    started_at = time.monotonic()
    connection = Connection(sock)  # first, so that the agent's end is seen while weights load
    try:
        loaded = _load_script(config) if config.script else _load_model(config)
    except (ConfigError, CannotLoad) as error:
        sys.stderr.write(f"engine: {error}\n")
        return EXIT_CANNOT_LOAD
    schedule = _schedule_config(
        config, loaded.context_tokens, loaded.vocab_size, loaded.prefill_tokens_per_s
    )
    try:
        tiers = _open_tiers(config, loaded)
        mover = _open_mover(config, loaded, connection.wake)
    except ConfigError as error:
        sys.stderr.write(f"engine: {error}\n")
        return EXIT_BAD_CONFIG
    if tiers is not None:
        schedule = msgspec.structs.replace(
            schedule, tiers=tiers.configs, page_bytes=loaded.page_bytes
        )
    info = wire.EngineInfo(
        engine=config.engine_index,
        model=config.spec.name,
        identity=interchangeable_id(config.spec.identity, config.promised),
        context_tokens=schedule.context_tokens,
        page_size=config.spec.page_size,
        num_pages=config.num_pages,
        bundle_digest=config.spec.bundle_digest,
        tokenizer_digest=config.spec.tokenizer_digest,
        layout_id=loaded.layout_id,
        weights_digest=loaded.weights_digest,
        weights_precision=loaded.weights_precision,
        kv_precision=loaded.kv_precision,
        compute=config.promised,
        step_tokens=config.step_tokens,
        prefill_tokens_per_s=schedule.prefill_tokens_per_s,
        aliases=config.spec.aliases,
        page_bytes=loaded.page_bytes,
        tier_pages=tuple((tier.name, tier.capacity_pages) for tier in schedule.tiers),
        host_arena="" if tiers is None else tiers.host_arena,
        page_kind=loaded.page_kind,
        peer="" if mover is None else mover.address,
    )
    scheduler = Scheduler(schedule)
    if tiers is not None:
        for name, records in tiers.found.items():
            scheduler.tiers.load(name, records, time.monotonic())
        for name, peek in tiers.peeks.items():
            scheduler.tiers.share(name, peek)
        tiers.store.wake = connection.wake
        if "disk" in tiers.found or tiers.host_arena:
            connection.leave_slowly()
    engine = Engine(
        info,
        scheduler,
        loaded.runner,
        vocab_size=loaded.vocab_size,
        clock=time.monotonic,
        overlap=config.overlap == "on",
        store=None if tiers is None else tiers.store,
        lost_tiers=() if tiers is None else tiers.lost,
        mover=mover,
    )
    up = wire.EngineUp(info, time.monotonic() - started_at)
    connection.send([(AGENT_CHANNEL, wire.encode(up))])
    return run(engine, connection)


def _open_tiers(config: EngineConfig, loaded: Loaded) -> OpenTiers | None:
    if not (config.kv_host_mb or config.kv_disk_mb or config.cluster_store):
        return None
    if loaded.open_tiers is None:
        sys.stderr.write("engine: --script computes no pages, so there are no slower tiers\n")
        return None
    return loaded.open_tiers()


def _open_mover(
    config: EngineConfig, loaded: Loaded, wake: Callable[[], None]
) -> TransferMover | None:
    if config.peer_port is None or loaded.open_mover is None:
        return None
    return loaded.open_mover(wake)


def _new_mover(
    config: EngineConfig, memory: PageMemory, layout: PageLayout, wake: Callable[[], None]
) -> TransferMover:
    """Raises ConfigError where it cannot listen."""
    from engine.transfer.mover import TransferMover
    from engine.transfer.rooms import WAYS

    host, port = config.peer_host, config.peer_port or 0
    try:
        return TransferMover(
            memory, layout, listen=(host, port), ways=WAYS[config.transfer], wake=wake
        )
    except OSError as error:
        raise ConfigError(
            "--peer-host, --peer-port",
            found=f"{host} port {port} ({error})",
            allowed="an address of this machine, and a port that is free there",
            remedy="name another, or --peer-port none to take no part in splits",
        ) from error


def read_config(options: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError naming the flag at fault."""
    try:
        spec = msgspec.json.decode(options.model_spec, type=ModelSpec)
    except msgspec.DecodeError as error:  # what ModelSpec itself refuses arrives as this too
        raise ConfigError(
            "--model-spec",
            found=str(error),
            allowed="the JSON that `python -m node_agent models spec NAME --json` prints",
            remedy="mend that field",
        ) from error
    return EngineConfig(
        spec=spec,
        engine_index=options.engine_index,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        compute=options.compute,
        announce=options.announce,
        kv_device_tokens=options.kv_device_tokens,
        threads=options.threads,
        device=options.device,
        step_tokens=options.step_tokens,
        max_running=options.max_running,
        overlap=options.overlap,
        script=options.script,
        bundle=options.bundle,
        kv_host_mb=options.kv_host_mb,
        kv_host_share=options.kv_host_share,
        kv_disk_mb=options.kv_disk_mb,
        kv_disk_dir=options.kv_disk_dir,
        cluster_store=options.cluster_store,
        peer_host=options.peer_host,
        peer_port=read_peer_port(options.peer_port),
        transfer=options.transfer,
    )


def _schedule_config(
    config: EngineConfig,
    context_tokens: int,
    vocab_size: int,
    prefill_tokens_per_s: float | None = None,
) -> ScheduleConfig:
    """The context that is announced is the one that is kept: no longer than the pool."""
    limits = [context_tokens, config.num_pages * config.spec.page_size]
    if config.spec.context_tokens is not None:
        limits.append(config.spec.context_tokens)
    schedule = ScheduleConfig(
        num_pages=config.num_pages,
        page_size=config.spec.page_size,
        context_tokens=min(limits),
        vocab_size=vocab_size,
        step_tokens=config.step_tokens,
        max_running=config.max_running,
    )
    if prefill_tokens_per_s is None:
        return schedule
    return msgspec.structs.replace(schedule, prefill_tokens_per_s=prefill_tokens_per_s)


def _load_script(config: EngineConfig) -> Loaded:
    from engine.script import ScriptRunner
    from engine.script_pages import ScriptPages

    assert config.script is not None
    bundle = _read_bundle(config)
    pages = ScriptPages(config.num_pages, config.spec.page_size)
    return Loaded(
        runner=ScriptRunner.load(config.script, bundle, pages),
        context_tokens=bundle.context_tokens,
        vocab_size=bundle.vocab_size,
        layout_id="script",
        weights_digest="script",
        weights_precision="script",
        kv_precision="script",
        prefill_tokens_per_s=None,
        open_mover=partial(_new_mover, config, pages, pages.layout),
    )


def _load_model(config: EngineConfig) -> Loaded:
    from engine.warmup import measure_prefill, work_clock

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch loads OpenMP
    # Late, because it imports torch: a scripted engine starts without it. What an import makes
    # stays: the collector need not walk it, now again and again, later in the middle of a step.
    gc.disable()
    module = importlib.import_module("engine.execute.runner")
    weights = importlib.import_module("engine.execute.weights")
    gc.freeze()
    gc.enable()
    threads = config.threads or own_cores().usable
    runner_config = module.RunnerConfig(
        num_pages=config.num_pages,
        page_size=config.spec.page_size,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        compute=config.compute,
        device=config.device,
        threads=threads,
        step_tokens=config.step_tokens,
    )
    try:
        runner = module.load_runner(config.spec, runner_config, _report_progress)
    except weights.CheckpointError as error:
        raise CannotLoad(str(error)) from error
    why_torch = importlib.import_module("engine.execute.kernels.cpu.library").why_absent()
    if why_torch is not None:
        sys.stderr.write(f"engine: torch computes every op, which is slower: {why_torch}\n")
    _report_pages(runner)
    _report_progress("measure", 0.0)
    schedule = _schedule_config(config, runner.context_tokens, runner.vocab_size)
    is_cpu = module.choose_device(config.device).type == "cpu"
    clock = work_clock(threads) if is_cpu else time.monotonic
    rate = measure_prefill(runner, schedule, clock)
    _report_progress("measure", 1.0)
    kind = page_kind(
        identity=config.spec.identity,
        compute=config.promised,
        tokenizer_digest=config.spec.tokenizer_digest,
        weights_digest=runner.weights_digest,
        layout_id=runner.layout_id,
        arithmetic=runner.arithmetic,
    )
    return Loaded(
        runner=runner,
        context_tokens=runner.context_tokens,
        vocab_size=runner.vocab_size,
        layout_id=runner.layout_id,
        weights_digest=runner.weights_digest,
        weights_precision=runner.weights_precision,
        kv_precision=runner.kv_precision,
        prefill_tokens_per_s=rate,
        page_bytes=runner.page_bytes,
        page_kind=kind,
        open_tiers=lambda: open_tiers(
            config,
            runner.arena.layout,
            module.page_memory(runner.arena),
            kind=kind,
            progress=_report_progress,
        ),
        open_mover=lambda wake: _new_mover(
            config, module.page_memory(runner.arena), runner.arena.layout, wake
        ),
    )


def _read_bundle(config: EngineConfig) -> Bundle:
    assert config.bundle is not None
    try:
        return decode_bundle(Path(config.bundle).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            "--bundle",
            found=f"{config.bundle} ({error})",
            allowed="an encoded tokenizer bundle",
            remedy="let the node agent write it",
        ) from error


def _report_pages(runner: ModelRunner) -> None:
    """What the pool holds, and how far quantised pages were found to be from bf16 ones."""
    pages, room, found = runner.arena.num_pages, available_bytes(), runner.divergence
    _report(
        "engine_capacity",
        kv_dtype=runner.kv_precision,
        tokens=pages * runner.arena.layout.page_size,
        pages=pages,
        page_bytes=runner.page_bytes,
        bytes=pages * runner.page_bytes,
        available_bytes=room,
    )
    if found is not None:
        _report("engine_kv_self_test", kv_dtype=runner.kv_precision, **asdict(found))


def _report_progress(stage: str, share: float) -> None:
    """The agent may show it."""
    _report("engine_loading", stage=stage, share=share)


def _report(event: str, **fields: object) -> None:
    """One JSON line on stderr."""
    line = msgspec.json.encode({"event": event, **fields})
    sys.stderr.write(line.decode() + "\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    commands = parser.add_subparsers(required=True)
    flags = commands.add_parser("serve", help="serve one model on an inherited socket")
    flags.add_argument("--fd", type=int, required=True, help="the socketpair to the node agent")
    flags.add_argument("--model-spec", required=True, help="ModelSpec as JSON")
    flags.add_argument("--engine-index", type=int, required=True, help="index on this node")
    flags.add_argument("--dtype", choices=get_args(settings.DType), default="auto")
    flags.add_argument("--kv-dtype", default="auto", help=", ".join(get_args(settings.KvDType)))
    flags.add_argument("--compute", default="exact", help="exact or fast")
    flags.add_argument(
        "--announce", default="auto", help="fast: it takes pages of engines that compute otherwise"
    )
    flags.add_argument("--device", choices=get_args(settings.Device), default="auto")
    flags.add_argument("--kv-device-tokens", type=int, default=settings.DEFAULT_KV_DEVICE_TOKENS)
    flags.add_argument("--threads", type=int, help="default: by the cores there are")
    flags.add_argument("--step-tokens", type=int, default=settings.DEFAULT_STEP_TOKENS)
    flags.add_argument("--max-running", type=int, default=settings.DEFAULT_MAX_RUNNING)
    flags.add_argument(
        "--overlap",
        choices=get_args(settings.Overlap),
        default="off",
        help="on: plan and tell of steps while others compute, where a core is to spare",
    )
    flags.add_argument("--kv-host-mb", type=int, default=0, help="host tier; 0: none")
    flags.add_argument(
        "--kv-host-share", metavar="DIR", help="engines that name one share a host tier"
    )
    flags.add_argument("--kv-disk-mb", type=int, default=0, help="disk tier; 0: none")
    flags.add_argument("--kv-disk-dir", help="the disk tier's folder, this engine's alone")
    flags.add_argument("--cluster-store", metavar="URL", help="pages shared by a cluster")
    flags.add_argument(
        "--peer-host", default="127.0.0.1", metavar="ADDR", help="where other engines bring pages"
    )
    flags.add_argument(
        "--peer-port", default="0", metavar="PORT", help="0: a free one; none: no part in splits"
    )
    flags.add_argument(
        "--transfer",
        choices=get_args(settings.TransferWay),
        default="auto",
        help="auto: shared memory on one machine, else tcp",
    )
    flags.add_argument("--script", help="answer from this JSON file instead of a model")
    flags.add_argument("--bundle", help="the tokenizer bundle that --script speaks in")
    return parser


if __name__ == "__main__":
    sys.exit(main())
