"""A POST that is sent again with its Idempotency-Key gets the one answer: it runs and bills once.

A key belongs to an API key and a route. Its first request runs in a task of its own, and every
client, the first one too, reads what that task has answered: a retry gets the bytes so far and then
the rest as it comes. When the last reader leaves, the run has a short grace to be asked for again;
then it is aborted as ever. What was not billed (refusals, faults of ours) leaves the key free; what
was billed and is no longer in memory is known by its ledger row, also after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Literal

from starlette.types import Message

from gateway.api.answers import Answer, AnswerStore, Head, Reader
from gateway.api.body import ClientLeft
from gateway.api.exchange import Exchange
from gateway.api.ledger_read import read_ledger
from gateway.api.stall import StallGuard
from gateway.api.time_limit import TimeLimit
from gateway.config import GatewayConfig
from gateway.errors import GatewayError, fault, quote
from gateway.ledger.reader import LedgerReader
from gateway.ledger.spent import find_spent
from gateway.telemetry import Metrics

HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
SLACK_S = 15.0  # a run ends at its deadline, give or take; no reader waits longer than this for it
SETTLING_S = 0.1  # how soon a row that has ended is known to have
OWN_HEADERS = frozenset((b"x-request-id", b"connection"))  # of one exchange, never passed on
Handler = Callable[[Exchange], Awaitable[None]]
Serve = Callable[[Awaitable[None], Exchange], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Run:
    digest: bytes
    answer: Answer
    exchange: Exchange
    task: asyncio.Task[None] | None = None
    grace: asyncio.TimerHandle | None = None
    is_told: bool = False  # its first client's log line is written


@dataclass(slots=True)
class Idempotency:
    """All keys of one gateway; used on its loop."""

    config: GatewayConfig
    secret: bytes  # keys are known by digests salted with it, here and in the ledger
    reader: LedgerReader
    metrics: Metrics
    on_outlived: Callable[[Exchange], None]  # an answer that ended after its first client
    store: AnswerStore = field(init=False)
    _run_by_answer: dict[Answer, _Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = self.config.idempotency
        self.store = AnswerStore(
            answer_bytes=limits.answer_bytes,
            stored_bytes=limits.stored_bytes,
            lifetime_s=limits.lifetime_s,
        )

    async def answer(self, exchange: Exchange, scope: str, handler: Handler, serve: Serve) -> None:
        """Run handler, or join who runs it. serve turns what it raises into an answer.

        Raises GatewayError (400, 409, 422) for a key that cannot be used so.
        """
        digest = self._digest(exchange, scope)
        body_digest = blake2b(exchange.body, digest_size=16).digest()
        now = time.monotonic()
        answer = self.store.find(digest, now)
        if answer is None:
            request_id = self.store.spent_by(digest)
            if request_id is not None:
                self._note(exchange, "refused")
                raise _gone(request_id)
            self._note(exchange, "first")
            answer, reader = self.store.begin(
                digest, request_id=exchange.request_id, body_digest=body_digest
            )
            self._start(digest, answer, exchange, handler, serve)
        else:
            exchange.body = b""
            reader = self._join(answer, exchange, body_digest)
        try:
            await self._relay(exchange, answer, reader)
        finally:
            self._leave(answer, reader, exchange)

    def _digest(self, exchange: Exchange, scope: str) -> bytes:
        text = exchange.headers[HEADER]
        if not (1 <= len(text) <= MAX_KEY_CHARS and text.isascii() and text.isprintable()):
            raise GatewayError(
                "invalid_request",
                field=HEADER,
                found=f"{len(text)} characters" if text.isprintable() else quote(text),
                allowed=f"1 to {MAX_KEY_CHARS} printable ASCII characters",
                remedy="send a UUID, and the same one with each retry",
            )
        sent = [name.lower() for name, _ in exchange.scope["headers"]].count(HEADER.encode())
        if sent > 1:  # the next proxy might choose another of them
            raise GatewayError(
                "invalid_request",
                field=HEADER,
                found=f"{sent} of them",
                allowed="one",
                remedy="send one key",
            )
        assert exchange.key is not None, "the route's role is client"
        named = "\0".join((exchange.key.key_id, scope, text)).encode()
        return blake2b(named, digest_size=16, key=self.secret, person=b"idempotency").digest()

    def _join(self, answer: Answer, exchange: Exchange, body_digest: bytes) -> Reader:
        if answer.body_digest != body_digest:
            self._note(exchange, "refused")
            raise GatewayError(
                "idempotency_key_reused",
                field=HEADER,
                found=f"a key that request {answer.request_id} came with, and another body",
                allowed="the same body, byte for byte",
                remedy="send a new key with a new request",
            )
        reader = self.store.join(answer)
        if reader is None:
            self._note(exchange, "refused")
            raise _in_progress(answer.request_id, 1.0)
        self._note(exchange, "joined" if answer.is_running else "replayed")
        run = self._run_by_answer.get(answer)
        if run is not None and run.grace is not None:
            run.grace.cancel()
            run.grace = None
        return reader

    # --- the run ----------------------------------------------------------------------------------

    def _start(
        self, digest: bytes, answer: Answer, exchange: Exchange, handler: Handler, serve: Serve
    ) -> None:
        own = Exchange(
            scope=exchange.scope,
            receive=_never,
            send=partial(self._record, answer),
            request_id=exchange.request_id,
            started=exchange.started,
            headers=exchange.headers,
            parameters=exchange.parameters,
            notes=exchange.notes,  # one log line tells of both
            body_done=True,
            body=exchange.body,
            key=exchange.key,
            idempotency_digest=digest,
        )
        exchange.body = b""
        run = self._run_by_answer[answer] = _Run(digest, answer, own)
        run.task = asyncio.create_task(self._run(run, handler, serve))
        run.task.add_done_callback(partial(self._finish, run))

    async def _run(self, run: _Run, handler: Handler, serve: Serve) -> None:
        with suppress(ClientLeft):  # its readers took nothing for so long that it was given up
            await serve(self._unless_spent(run, handler), run.exchange)

    def _finish(self, run: _Run, _task: asyncio.Task[None]) -> None:
        """Not in the task's own end: one that is cancelled before its first step has none."""
        if run.grace is not None:
            run.grace.cancel()
        del self._run_by_answer[run.answer]
        self.store.finish(run.digest, run.answer, keep=run.exchange.is_billed, now=time.monotonic())
        if run.is_told:
            self.on_outlived(run.exchange)

    async def _unless_spent(self, run: _Run, handler: Handler) -> None:
        spent = await read_ledger(self.reader, partial(find_spent, digest=run.digest))
        if spent is not None and spent.is_billed:
            raise _gone(spent.request_id)
        if spent is not None:
            raise _in_progress(spent.request_id, SETTLING_S)
        await handler(run.exchange)

    async def _record(self, answer: Answer, message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.head = Head(
                message["status"],
                tuple((n, v) for n, v in message["headers"] if n not in OWN_HEADERS),
            )
            answer.wake()
            return
        answer.is_complete = not message.get("more_body", False)
        self.store.write(answer, message.get("body", b""))
        while answer.is_full:  # the handler's own guard bounds this wait
            answer.room.clear()
            await answer.room.wait()

    # --- its readers ------------------------------------------------------------------------------

    async def _relay(self, exchange: Exchange, answer: Answer, reader: Reader) -> None:
        """Everything from the start to the end, as it comes. Raises GatewayError, ClientLeft."""
        longest_s = self.config.limits.request_deadline_s + SLACK_S
        try:
            async with StallGuard(self.config.stream.send_stall_s) as guard:
                while True:
                    data = self.store.take(answer, reader)
                    if answer.head is not None and exchange.status is None:
                        headers = _headers(exchange, answer)
                        await guard.send(exchange.start(answer.head.status, headers))
                    if answer.is_complete and reader.place == answer.start + len(answer.data):
                        await guard.send(exchange.end(data))
                        return
                    if data:
                        await guard.send(exchange.write(data))
                    elif not answer.is_running:
                        raise fault("aborted")
                    else:
                        await _woken(reader, longest_s)
        except TimeoutError:  # who takes nothing for so long is gone
            exchange.client_left = True
            raise ClientLeft from None

    def _leave(self, answer: Answer, reader: Reader, exchange: Exchange) -> None:
        is_alone = self.store.leave(answer, reader)
        run = self._run_by_answer.get(answer)
        if run is None or answer.is_complete:
            return
        run.is_told = run.is_told or exchange.request_id == answer.request_id
        if not is_alone:
            return
        grace_s = self.config.idempotency.leave_grace_s
        if exchange.client_left and answer.is_whole and grace_s > 0:
            loop = asyncio.get_running_loop()
            run.grace = loop.call_later(grace_s, self._give_up, run, True)
        else:
            self._give_up(run, exchange.client_left)

    def _give_up(self, run: _Run, client_left: bool) -> None:
        """Abort and settle: what was produced if its client left, nothing if we cut it off."""
        assert run.task is not None
        run.answer.is_given_up = True
        run.exchange.client_left = client_left
        run.task.cancel()

    def _note(
        self, exchange: Exchange, outcome: Literal["first", "joined", "replayed", "refused"]
    ) -> None:
        exchange.notes["idempotency"] = outcome
        self.metrics.count("kagari_idempotent_requests", outcome=outcome)

    @property
    def num_running(self) -> int:
        return len(self._run_by_answer)

    async def close(self) -> None:
        """End what still runs: no retry can come any more. Links and ledger must still be there."""
        runs = list(self._run_by_answer.values())
        for run in runs:
            self._give_up(run, client_left=not run.answer.readers)
        await asyncio.gather(*(run.task for run in runs if run.task), return_exceptions=True)


def _headers(exchange: Exchange, answer: Answer) -> list[tuple[str, str]]:
    assert answer.head is not None
    headers = [(name.decode(), value.decode()) for name, value in answer.head.headers]
    if exchange.request_id == answer.request_id:
        return headers
    return [
        *headers,
        ("idempotent-replayed", "true"),
        ("x-kagari-original-request-id", answer.request_id),
    ]


async def _woken(reader: Reader, longest_s: float) -> None:
    try:
        with TimeLimit(longest_s):
            await reader.wake.wait()
    except TimeoutError:
        raise fault("deadline_exceeded") from None
    reader.wake.clear()


async def _never() -> Message:
    raise AssertionError("a run has no client of its own to hear from")


def _in_progress(request_id: str, retry_after_s: float) -> GatewayError:
    return GatewayError(
        "idempotency_in_progress",
        field=HEADER,
        found=f"request {request_id}, which has not ended",
        allowed="one request at a time with this key",
        remedy="send the request again with the same key",
        retry_after_s=retry_after_s,
    )


def _gone(request_id: str) -> GatewayError:
    return GatewayError(
        "idempotent_answer_gone",
        field=HEADER,
        found=f"request {request_id}, billed once, whose answer is not kept",
        allowed="a key whose answer is kept, or a new one",
        remedy="send a new key if it is to run and be billed again",
    )
