"""One attempt at one upstream: the requests that its dialect makes of a client's one.

Aggregated: one request. vLLM in pairs: the prefill server first, whole and with one token; it
answers where its blocks are, and the decode server is told so (do_remote_prefill). SGLang in pairs:
both at once, with a room where they meet; neither gets anywhere without the other, so the end of
one by a fault ends the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from gateway.api.exchange import dice
from gateway.api.time_limit import TimeLimit
from gateway.upstreams.events import (
    DONE,
    Event,
    EventSplitter,
    Garbled,
    data_of,
    read_chunk,
)
from gateway.upstreams.faults import (
    TransportFault,
    UpstreamFault,
    garbled,
    read_words,
    refused,
    unreachable,
)
from gateway.upstreams.feed import Feed
from gateway.upstreams.registry import Way
from gateway.upstreams.request import (
    PATHS,
    RelayRequest,
    bootstrapped,
    limited,
    prefill_only,
    written,
)
from gateway.upstreams.rewrite import Members, decode_members
from gateway.upstreams.server import Server
from gateway.upstreams.usage import Told, read_usage

if TYPE_CHECKING:
    from gateway.upstreams.transport import Answer

ERROR_BYTES = 64 << 10
PREFILL_USAGE_S = 0.3  # how long an answer that has ended waits for the prefill server's count
AFTER_DONE_S = 0.02
FREE_WITHIN_S = 10.0


@dataclass(slots=True)
class Attempt:
    """headers: of its requests. computed: called when the prompt is known to be computed."""

    request: RelayRequest
    way: Way
    members: Members
    headers: Mapping[str, str]
    feed: Feed
    deadline_s: float
    computed: Callable[[], None]
    start_ending: Callable[[Coroutine[Any, Any, None]], None]
    prefill_told: Told | None = None
    is_answered: bool = False

    async def run(self) -> None:
        """Returns when the answer is whole. Raises UpstreamFault."""
        decode = self.way.decode
        if decode is None:
            async with self._asked(self.way.first, self.members) as answer:
                await self._read(answer)
        elif self.way.upstream.config.dialect == "vllm":
            await self._vllm_pair(decode)
        else:
            await self._sglang_pair(decode)

    # --- vLLM -------------------------------------------------------------------------------------

    async def _vllm_pair(self, decode: Server) -> None:
        handed: Members = {}
        is_taken = False
        try:
            body = prefill_only(self.members)
            async with self._asked(self.way.first, body, is_whole=True) as answer:
                told = decode_members(await answer.whole(self.way.upstream.config.answer_bytes))
                params = told.get("kv_transfer_params", msgspec.Raw(b"null"))
                if bytes(params) != b"null":  # a prompt under a block has none
                    handed = {"kv_transfer_params": params}
                self.prefill_told = _usage_of(told)
                self.computed()
            async with self._asked(decode, self.members | handed) as answer:
                is_taken = True
                await self._read(answer)
        except asyncio.CancelledError:
            if handed and not is_taken:
                self.start_ending(self._free(decode, self.members | handed))
            raise

    async def _free(self, decode: Server, members: Members) -> None:
        """Nobody waits any more, but the prefill server keeps its blocks until somebody has fetched
        them: have the decode server begin, and leave it."""
        body = limited(members, 1)
        with suppress(UpstreamFault, TimeoutError), TimeLimit(FREE_WITHIN_S):
            async with self._asked(decode, body) as answer:
                await answer.piece()

    # --- SGLang -----------------------------------------------------------------------------------

    async def _sglang_pair(self, decode: Server) -> None:
        config, request = self.way.upstream.config, self.request
        host = urlsplit(self.way.first.base).hostname or ""
        members = bootstrapped(
            self.members,
            f"[{host}]" if ":" in host else host,
            config.bootstrap_port,
            [dice.getrandbits(63) for _ in range(request.num_prompts)],
            is_batch=request.is_batch,
        )
        try:
            async with asyncio.TaskGroup() as legs:
                prefill = legs.create_task(self._prefill_leg(members))
                async with self._asked(decode, members) as answer:
                    await self._read(answer)
                self.is_answered = True
                await asyncio.wait((prefill,), timeout=PREFILL_USAGE_S)
                prefill.cancel()
        # Before Python 3.11.4 `except*` wraps what is raised in it in a group of one.
        except BaseExceptionGroup as group:
            if group.split(UpstreamFault)[1] is not None:
                raise
            raise group.exceptions[0] from None

    async def _prefill_leg(self, members: Members) -> None:
        """What it answers is a token that the decode server tells too; its usage counts."""
        try:
            async with self._asked(self.way.first, members) as answer:
                if self.request.stream:
                    reader = EventReader(answer)
                    while events := await reader.next():
                        for event in events:
                            self.prefill_told = read_usage(event.chunk.usage) or self.prefill_told
                else:
                    data = await answer.whole(self.way.upstream.config.answer_bytes)
                    self.prefill_told = _usage_of(decode_members(data))
        except UpstreamFault:
            if not self.is_answered:  # else all that is lost is a count
                raise

    # --- one request ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asked(
        self, server: Server, members: Members, *, is_whole: bool = False
    ) -> AsyncIterator[Answer]:
        """Its answer with status 200; whatever goes wrong until the block ends is its fault."""
        config = self.way.upstream.config
        # Without a stream the head comes when all is done.
        patience_s = config.first_byte_s if self.request.stream or is_whole else self.deadline_s
        try:
            async with server.connections.post(
                PATHS[self.request.route],
                written(members),
                self.headers,
                first_byte_s=patience_s,
                idle_s=config.idle_s,
            ) as answer:
                if answer.status != 200:
                    body = await answer.whole(ERROR_BYTES)
                    raise refused(answer.status, body, answer.header("retry-after"))
                yield answer
        except TransportFault as fault:
            raise unreachable(fault).at(server) from fault
        except Garbled as fault:
            raise garbled(str(fault)).at(server) from fault
        except UpstreamFault as fault:
            fault.at(server)
            raise

    async def _read(self, answer: Answer) -> None:
        if not self.request.stream:
            data = await answer.whole(self.way.upstream.config.answer_bytes)
            members = decode_members(data)
            if "choices" not in members:
                raise refused(_status_of(data), data)
            self.feed.has_begun = True
            self.feed.whole = data
            self.computed()
            return
        finished: set[int] = set()
        reader = EventReader(answer)
        while events := await reader.next():
            self.computed()
            for event in events:
                finished |= {one.index for one in event.chunk.choices or () if one.finish_reason}
                await self.feed.put(event)
        if not reader.is_done and len(finished) < self.request.choices:
            raise garbled("a stream that stopped before its end")


class EventReader:
    """The chunks of an answer, comments left out; is_done: it said that it was whole."""

    def __init__(self, answer: Answer) -> None:
        self.is_done = False
        self._answer = answer
        self._splitter = EventSplitter()
        self._is_at_end = False

    async def next(self) -> list[Event]:
        """What came next, at least one; nothing at the end. Raises the faults of all layers."""
        found: list[Event] = []
        while not found and not self._is_at_end:
            piece = await self._answer.piece()
            self._is_at_end = piece is None
            for data in self._splitter.rest() if piece is None else self._splitter.feed(piece):
                content = data_of(data)
                if content is None or self.is_done:
                    continue
                if content.strip() == DONE:
                    self.is_done = self._is_at_end = True
                    await self._read_out()
                    continue
                chunk = read_chunk(content)
                if chunk.kind == "error" or chunk.error is not None:
                    raise refused(_status_of(content), content)
                found.append(Event(data, chunk))
        return found

    async def _read_out(self) -> None:
        """A connection whose answer was read to its end can be used again."""
        with suppress(TransportFault, TimeoutError), TimeLimit(AFTER_DONE_S):
            while await self._answer.piece() is not None:
                continue


def _status_of(data: bytes) -> int:
    """An error that came with status 200 often has its own inside."""
    code = read_words(data).code
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    return code if type(code) is int and 400 <= code < 600 else 500


def _usage_of(members: Members) -> Told | None:
    usage = members.get("usage")
    return None if usage is None else read_usage(msgspec.json.decode(usage))
