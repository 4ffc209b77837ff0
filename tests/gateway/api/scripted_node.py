"""A node that does what the last user message tells it, over the real link, with a tiny tokenizer.

The message (or a whole prompt) may be JSON: {"say": text or a list of one a lane, "ids": a list of
a lane's tokens each, instead, "times": n, "delay_s": before each step, "first_s": before the first,
"gate": until the test opens the one of that name, "gate_after": so many tokens, else before any,
"step": tokens a frame or a list of such numbers, which take turns, "fail_after":
tokens, "fail": code, "fail_lane": only this one, "wait_lane": ends only when told to, "cut_after":
tokens, "cut_attempts": attempts that are cut, of any number, "forget": its pages do not stay,
"tiers": slower tiers, fastest first, and the tokens of a hit that each held, "transfers_lost": of
so many attempts that are split decode gets nothing}.
Anything else is answered with "ok". A token is a byte, so counts are easy to foretell.
Log probabilities are made up by `logprob_of`.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from policies.contract import wire
from policies.contract.bundle import Bundle, bundle_digest, encode_bundle, tokenizer_digest
from policies.contract.page_keys import interchangeable_id

PAGE_SIZE = 16
CONTEXT_TOKENS = 65_536
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _tokenizer_json() -> bytes:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in ("<|im_start|>", "<|im_end|>")
        ]
    )
    return tokenizer.to_str().encode()


TOKENIZER = Tokenizer.from_str(_tokenizer_json().decode())
START_ID = TOKENIZER.token_to_id("<|im_start|>")
END_ID = TOKENIZER.token_to_id("<|im_end|>")


def make_bundle(
    *, chat_template: str | None = TEMPLATE, parser_family: str | None = None
) -> Bundle:
    return Bundle(
        tokenizer_json=_tokenizer_json(),
        chat_template=chat_template,
        bos_token=None,
        eos_token="<|im_end|>",
        stop_token_ids=(END_ID,),
        add_bos=False,
        context_tokens=CONTEXT_TOKENS,
        page_size=PAGE_SIZE,
        vocab_size=TOKENIZER.get_vocab_size(),
        parser_family=parser_family,
    )


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def logprob_of(place: int, token: int, top: int) -> wire.TokenLogprob:
    """As if told by a model: of the token at this place, with its likeliest alternatives."""
    logprob = -(place + 1) / 8
    others = [((token + 1 + rank) % END_ID, logprob - 1 - rank) for rank in range(top)]
    return wire.TokenLogprob(logprob, 1, tuple([(token, logprob), *others][:top]))


@dataclass
class Served:
    """One Submit as the node saw it, and what became of it."""

    submit: wire.Submit
    text: str
    specials: int
    aborted: bool = False
    finished_keep: int | None = None
    keeps: dict[int, int] = field(default_factory=dict)  # by the lane's index
    sent: int = 0
    busy: int = 0  # lanes of the node when it came, its own included


@dataclass
class ScriptedNode:
    node_id: str
    models: dict[str, Bundle] = field(default_factory=lambda: {"tiny": make_bundle()})
    served: list[Served] = field(default_factory=list)
    resident: set[tuple[int, ...]] = field(default_factory=set)  # whole prefixes in pages
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    by_lane: dict[int, Served] = field(default_factory=dict)
    socket: ClientConnection | None = None
    wire_version: int = wire.WIRE_VERSION
    compute: wire.Compute = "exact"

    orders: list[wire.Pin | wire.Unpin | wire.Purge] = field(default_factory=list)
    pins: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # id → salt, pages
    pages_by_salt: dict[bytes, int] = field(default_factory=dict)  # what a purge finds
    obeys: bool = True  # else it answers no order
    opened: set[str] = field(default_factory=set)  # gates
    rules: list[tuple[str, dict[str, object]]] = field(default_factory=list)  # before messages
    role: wire.Role = "mixed"
    handovers: dict[bytes, int] = field(default_factory=dict)  # all nodes': cached by transfer_id
    kv_precision: str = "bf16"

    def _rule(self, text: str) -> dict[str, object]:
        """The script of the first rule whose words are in the prompt."""
        return next((script for words, script in self.rules if words in text), {})

    async def run(self, url: str, join_token: str) -> None:
        """Dial again whenever the link is cut; until cancelled."""
        headers = {"Authorization": f"Bearer {join_token}"}
        epoch = 0
        while True:
            epoch += 1
            try:
                async with connect(
                    url, additional_headers=headers, compression=None, max_size=16 << 20
                ) as socket:
                    self.socket = socket
                    await self._speak(socket, epoch)
            except (ConnectionClosed, OSError):
                for task in self.tasks.values():
                    task.cancel()
                self.tasks.clear()
                self.by_lane.clear()
                await asyncio.sleep(0.05)

    async def _speak(self, socket: ClientConnection, epoch: int) -> None:
        encoded = {name: encode_bundle(bundle) for name, bundle in self.models.items()}
        infos = tuple(
            wire.EngineInfo(
                engine=index,
                model=name,
                identity=interchangeable_id(name, self.compute),
                context_tokens=bundle.context_tokens,
                page_size=bundle.page_size,
                num_pages=100_000,
                bundle_digest=bundle_digest(encoded[name]),
                tokenizer_digest=tokenizer_digest(bundle.tokenizer_json),
                layout_id="test",
                weights_digest="0" * 64,
                weights_precision="q4_1",
                kv_precision=self.kv_precision,
                compute=self.compute,
                step_tokens=512,
                prefill_tokens_per_s=10_000.0,
                aliases=("tiny-alias",) if name == "tiny" else (),
                peer=f"{self.node_id}:1",
            )
            for index, (name, bundle) in enumerate(self.models.items())
        )
        await socket.send(
            wire.encode(
                wire.Hello(self.wire_version, 1, self.node_id, epoch, self.role, infos, "scripted")
            )
        )
        welcome = wire.decode_from_gateway(await socket.recv())
        assert isinstance(welcome, wire.Welcome), welcome
        for data in encoded.values():
            digest = bundle_digest(data)
            if digest in welcome.wanted_bundles:
                await socket.send(wire.encode(wire.BundlePart(digest, 0, 1, data)))
        async with asyncio.TaskGroup() as group:
            reports = group.create_task(self._report(socket, epoch, len(infos)))
            try:
                with suppress(ConnectionClosed):  # cut while we answered
                    async for frame in socket:
                        await self._receive(socket, wire.decode_from_gateway(frame))
            finally:
                reports.cancel()
        raise ConnectionClosed(None, None)

    async def _report(self, socket: ClientConnection, epoch: int, engines: int) -> None:
        sequence = 0
        with suppress(ConnectionClosed):
            while True:
                sequence += 1
                pinned = sum([pages for _, pages in self.pins.values()])
                loads = tuple(
                    wire.EngineReport(i, "ready", pages_pinned=pinned) for i in range(engines)
                )
                report = wire.Report(epoch, sequence, "ready", loads, role=self.role)
                await socket.send(wire.encode(report))
                await asyncio.sleep(0.5)

    async def _receive(self, socket: ClientConnection, message: object) -> None:
        match message:
            case wire.Submit():
                ids = wire.unpack_ids(message.prompt)
                served = Served(
                    submit=message,
                    text=TOKENIZER.decode(list(ids), skip_special_tokens=False),
                    specials=sum(token in (START_ID, END_ID) for token in ids),
                )
                self.served.append(served)
                for index, lane in enumerate(message.lanes):
                    self.by_lane[lane] = served
                    answer = self._answer_while_linked(socket, index, served, ids)
                    self.tasks[lane] = asyncio.create_task(answer)
                served.busy = len(self.by_lane)
            case wire.Pin() | wire.Unpin() | wire.Purge():
                self.orders.append(message)
                if self.obeys:
                    await self._obey(socket, message)
            case wire.SetRole(role):
                self.role = role
            case wire.Abort(lanes):
                for lane in lanes:
                    if lane in self.by_lane:  # else its end and the Abort crossed
                        self.by_lane[lane].aborted = True
                        await self._end(socket, lane, "abort")
            case wire.FinishLane(lane, keep):
                if lane in self.by_lane:
                    served = self.by_lane[lane]
                    served.finished_keep = keep
                    served.keeps[served.submit.lanes.index(lane)] = keep
                    await self._end(socket, lane, "stop")

    async def _obey(
        self, socket: ClientConnection, order: wire.Pin | wire.Unpin | wire.Purge
    ) -> None:
        """As an engine with room for max_pages would; pages are those of pins alone."""
        match order:
            case wire.Pin(engine, pin_id, prompt, salt, _, most):
                pages = len(prompt) // 4 // PAGE_SIZE
                if pages > most:
                    refused = wire.PinResult(engine, pin_id, 0, "pin_quota_exceeded", "no room")
                    await socket.send(wire.encode(refused))
                    return
                self.pins[pin_id] = (salt, pages)
                await socket.send(wire.encode(wire.PinResult(engine, pin_id, pages)))
            case wire.Unpin(_, pin_id):
                self.pins.pop(pin_id, None)
            case wire.Purge(engine, purge_id, salt):
                done = wire.PurgeResult(engine, purge_id, self.pages_by_salt.pop(salt, 0))
                await socket.send(wire.encode(done))

    async def _end(self, socket: ClientConnection, lane: int, reason: wire.FinishReason) -> None:
        task = self.tasks.pop(lane, None)
        if task is None:
            return
        task.cancel()
        served = self.by_lane.pop(lane)
        usage = wire.Usage(len(served.submit.prompt) // 4, 0, served.sent)
        await socket.send(
            wire.encode(
                wire.Step(served.submit.engine, 0, [], [], [wire.Finished(lane, reason, usage)])
            )
        )

    async def _answer_while_linked(
        self, socket: ClientConnection, index: int, served: Served, ids: array[int]
    ) -> None:
        with suppress(ConnectionClosed):  # another stream of this node cut the link
            await self._answer(socket, index, served, ids)

    async def _answer(
        self, socket: ClientConnection, index: int, served: Served, ids: array[int]
    ) -> None:
        lane = served.submit.lanes[index]
        script = self._rule(served.text) or _script(served.text)
        await asyncio.sleep(float(script.get("first_s", 0)))
        gate_after = int(script.get("gate_after", 0))
        if not gate_after:
            await self._pass_gate(script)
        submit, lost = served.submit, int(script.get("transfers_lost", 0))
        engine, sampling = submit.engine, submit.sampling
        cached = self._cached(ids)
        if submit.transfer is not None:
            transfer_id = wire.decode_transfer(submit.transfer).transfer_id
            if submit.role == "prefill":
                self.handovers[transfer_id] = cached
            else:
                while transfer_id not in self.handovers:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                cached = self.handovers.pop(transfer_id)
            if submit.role == "decode" and submit.attempt <= lost:
                await self._fail(socket, lane, served, "transfer_lost")
                return
        fails = "fail" in script and script.get("fail_lane", index) == index
        if fails and not script.get("fail_after"):
            await self._fail(socket, lane, served, str(script["fail"]))
            return
        if sampling.prompt_logprobs is not None and index == 0:
            await self._tell_prompt(socket, lane, served, ids)
        tokens = [] if submit.role == "prefill" else _tokens(script, index)[: sampling.max_tokens]
        slower = {f"{tier}_tokens": n for tier, n in script.get("tiers", {}).items() if cached}
        tier = next(reversed(script.get("tiers", {"device": 0})))
        started: list[wire.Rare] = [wire.Started(lane, cached, 0.0, tier, **slower)]
        step = script.get("step", 1)
        sizes, sent = cycle(step if isinstance(step, list) else [step]), 0
        while sent < len(tokens):
            if sent >= gate_after:
                await self._pass_gate(script)
            at = sent
            piece = tokens[at : at + next(sizes)]
            if fails and script.get("fail_after") is not None and sent >= script["fail_after"]:
                await self._fail(socket, lane, served, str(script["fail"]))
                return
            if served.submit.attempt <= int(script.get("cut_attempts", 99)) and (
                script.get("cut_after") is not None and sent >= script["cut_after"]
            ):
                await socket.close()
                return
            sent += len(piece)
            served.sent += len(piece)
            if sampling.logprobs is not None:
                entries = [
                    logprob_of(at + n, id_, sampling.logprobs) for n, id_ in enumerate(piece)
                ]
                started.append(wire.Logprobs(lane, tuple(entries)))
            await socket.send(
                wire.encode(wire.Step(engine, at, [lane] * len(piece), piece, started))
            )
            started = []
            await asyncio.sleep(float(script.get("delay_s", 0)))
        if script.get("wait_lane") == index:
            await asyncio.sleep(30)
        if not script.get("forget"):
            self._remember(ids)
        reason = "length" if len(tokens) == sampling.max_tokens else "stop"
        usage = wire.Usage(len(ids), cached, len(tokens), **slower)
        self.tasks.pop(lane, None)
        self.by_lane.pop(lane, None)
        rare = [*started, wire.Finished(lane, reason, usage)]
        await socket.send(wire.encode(wire.Step(engine, 0, [], [], rare)))

    async def _pass_gate(self, script: dict[str, Any]) -> None:
        while "gate" in script and script["gate"] not in self.opened:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    async def _tell_prompt(
        self, socket: ClientConnection, lane: int, served: Served, ids: array[int]
    ) -> None:
        """Chunk by chunk, before the first token."""
        top = served.submit.sampling.prompt_logprobs or 0
        for start in range(1, len(ids), 7):
            entries = [
                logprob_of(start + n, token, top) for n, token in enumerate(ids[start : start + 7])
            ]
            told = wire.PromptLogprobs(lane, start, tuple(entries))
            await socket.send(wire.encode(wire.Step(served.submit.engine, 0, [], [], [told])))

    async def _fail(self, socket: ClientConnection, lane: int, served: Served, code: str) -> None:
        self.tasks.pop(lane, None)
        self.by_lane.pop(lane, None)
        failed = wire.Failed(lane, code, "/secret/path of the node", wire.Usage(1, 0, served.sent))
        await socket.send(wire.encode(wire.Step(served.submit.engine, 0, [], [], [failed])))

    def _remember(self, ids: array[int]) -> None:
        for pages in range(1, len(ids) // PAGE_SIZE + 1):
            self.resident.add(tuple(ids[: pages * PAGE_SIZE]))

    def _cached(self, ids: array[int]) -> int:
        for pages in range((len(ids) - 1) // PAGE_SIZE, 0, -1):
            if tuple(ids[: pages * PAGE_SIZE]) in self.resident:
                return pages * PAGE_SIZE
        return 0


def _tokens(script: dict[str, Any], index: int) -> list[int]:
    """What a lane says."""
    if "ids" in script:
        ids: list[int] = script["ids"][index % len(script["ids"])]
        return ids
    say = script.get("say", "ok")
    text = say[index % len(say)] if isinstance(say, list) else str(say)
    return ids_of(text * int(script.get("times", 1)))


def _script(text: str) -> dict[str, Any]:
    messages = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)
    try:
        script = json.loads(messages[-1] if messages else text)
    except ValueError:
        return {}
    return script if isinstance(script, dict) else {}
