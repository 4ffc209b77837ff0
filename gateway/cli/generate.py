"""`kagari engine generate`: say hello to an engine over a socketpair; no gateway, no network.

This process holds the text, as a gateway does, and the engine the tokens. A model that is not here
yet is fetched first.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.children import die_with_parent, python_module
from gateway.cli.loading import LoadingLine
from gateway.cli.models import not_pulled, read_answer
from gateway.cli.problem import FAILED, Problem
from gateway.cli.serve_plan import require_compute
from policies.contract import wire
from policies.contract.bundle import decode_bundle
from policies.contract.page_keys import SALT_BYTES

if TYPE_CHECKING:
    from gateway.text.model import TextModel
    from gateway.text.output import OutputText

HEADER = struct.Struct("<IB")  # length of the message, channel
CHANNEL = 1  # as if this were the engine's first gateway
LANE = 0
LOAD_S = 600.0
ANSWER_S = 600.0

generate_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Ask:
    text: str
    raw: bool


@generate_app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Catalogue name or local folder.")],
    text: Annotated[str, typer.Argument(help="What to say.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, no chat form.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the engine.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cuda or cpu.")] = None,
    compute: Annotated[str | None, typer.Option(help="exact or fast.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object, at the end.")] = False,
) -> None:
    """Stream the model's answer to TEXT on stdout."""
    require_compute(compute)
    spec, bundle_path = describe_model(model)
    flags = [
        *(("--threads", str(threads)) if threads is not None else ()),
        *(("--device", device) if device is not None else ()),
        *(("--compute", compute) if compute is not None else ()),
    ]
    from gateway.text.model import TextModel

    bundle = decode_bundle(bundle_path.read_bytes())
    text_model = TextModel.load(bundle)
    prompt = asyncio.run(prompt_ids(text_model, Ask(text, raw)))
    room = (spec.get("context_tokens") or bundle.context_tokens) - len(prompt)
    if room < 1:
        raise Problem(
            "TEXT",
            found=f"{len(prompt)} tokens",
            allowed=f"fewer than the context, {len(prompt) + room} tokens",
            remedy="say less, or choose a model with a longer context",
        )
    sampling = wire.Sampling(
        max_tokens=min(max_tokens, room),
        temperature=temperature,
        seed=seed,
        stop_token_ids=text_model.stop_token_ids,
    )
    with running_engine(spec, flags) as (ours, loading):
        submit = submission(prompt, sampling)
        write = (lambda piece: None) if as_json else write_now
        answer = asyncio.run(stream(ours, submit, text_model.output(()), loading, write))
    if as_json:
        sys.stdout.write(json.dumps({"model": spec["name"], **asdict(answer)}) + "\n")


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish_reason: wire.FinishReason
    prompt_tokens: int
    completion_tokens: int


def write_now(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def describe_model(name: str) -> tuple[dict[str, Any], Path]:
    """(ModelSpec, file of the tokenizer bundle) by the node agent, which fetches what is absent."""
    done = subprocess.run(
        python_module("node_agent", "models", "spec", name, "--json"),
        stdout=subprocess.PIPE,
        check=False,
    )
    told = read_answer(done.stdout)
    if done.returncode != 0 or "model_spec" not in told:
        raise not_pulled(name, told.get("error") or {}, done.returncode)
    return told["model_spec"], Path(told["bundle_path"])


async def prompt_ids(text_model: TextModel, ask: Ask) -> array[int]:
    if ask.raw:
        return await text_model.raw_prompt(ask.text)
    return await text_model.chat_prompt([{"role": "user", "content": ask.text}])


def submission(prompt: array[int], sampling: wire.Sampling) -> wire.Submit:
    return wire.Submit(
        request_id="generate",
        attempt=1,
        engine=0,
        lanes=(LANE,),
        prompt=wire.pack_ids(prompt),
        salt=bytes(SALT_BYTES),
        sampling=sampling,
        deadline_s=ANSWER_S,
    )


async def stream(
    ours: socket.socket,
    submit: wire.Submit,
    output: OutputText,
    loading: LoadingLine,
    write: Callable[[str], None],
) -> Answer:
    """Ask, and write text as it comes. Raises Problem when the engine ends on the way."""
    reader, writer = await asyncio.open_connection(sock=ours)
    frames = EngineFrames(reader, writer)
    try:
        await frames.wait_until_up()
        loading.loaded()
        await frames.send(submit)
        pieces: list[str] = []
        async for tokens in frames.tokens():
            pieces.append(output.push(tokens))
            write(pieces[-1])
        pieces.append(output.flush())
        write(pieces[-1] + "\n")
    finally:
        writer.close()
    end = frames.end
    assert end is not None, "tokens() ends with it or raises"
    return Answer("".join(pieces), end.reason, end.usage.prompt_tokens, end.usage.completion_tokens)


class EngineFrames:
    """The gateway's half of the socket to an engine, for one stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.end: wire.Finished | None = None

    async def send(self, message: wire.AgentToEngine) -> None:
        data = wire.encode(message)
        self._writer.write(HEADER.pack(len(data), CHANNEL) + data)
        await self._writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """(channel, message); raises Problem when the engine has ended."""
        try:
            length, channel = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return channel, await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise engine_ended() from error

    async def wait_until_up(self) -> None:
        async with asyncio.timeout(LOAD_S):
            while True:
                channel, data = await self.receive()
                if channel == 0 and isinstance(wire.decode_from_engine(data), wire.EngineUp):
                    return

    async def tokens(self) -> AsyncIterator[list[int]]:
        """Each step's tokens until the stream ends; raises Problem when it fails."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                channel, data = await self.receive()
                if channel != CHANNEL:
                    continue
                step = wire.decode_from_node(data)
                assert isinstance(step, wire.Step)
                yield step.tokens
                for rare in step.rare:
                    if isinstance(rare, wire.Failed):
                        raise Problem(
                            "engine",
                            found=f"{rare.code}: {rare.message}",
                            allowed="a stream that finishes",
                            remedy="see docs/errors.md for this code",
                            exit_code=FAILED,
                        )
                    if isinstance(rare, wire.Finished):
                        self.end = rare
                        return


@contextmanager
def running_engine(
    spec: dict[str, Any], flags: list[str]
) -> Iterator[tuple[socket.socket, LoadingLine]]:
    """An engine process: our end of its socket, at whose end it exits, and what it says."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            python_module(
                "engine",
                "serve",
                *("--fd", str(theirs.fileno())),
                *("--model-spec", json.dumps(spec)),
                *("--engine-index", "0"),
                *flags,
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            process_group=0,
            preexec_fn=die_with_parent(),
        )
    assert process.stderr is not None
    loading = LoadingLine(process.stderr)
    try:
        yield ours, loading
    finally:
        ours.close()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(2)
        loading.close()


def engine_ended() -> Problem:
    return Problem(
        "engine",
        found="its process ended",
        allowed="an engine that runs until it is told to stop",
        remedy="read what it said above; kagari doctor checks the machine",
        exit_code=FAILED,
    )
