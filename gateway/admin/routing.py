"""Routing for the operator: where a request would go, or why a recent one went where it did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.api.chat_request import read_chat_request
from gateway.api.completion_begin import (
    Prompt,
    find_served,
    make_dispatch,
    session_key,
    tokenised,
)
from gateway.api.completions import read_prompt
from gateway.api.completions_request import read_completion_request
from gateway.api.exchange import Exchange
from gateway.api.typed_input import decoded, read_query, refuse_field
from gateway.errors import GatewayError, quote
from gateway.nodes.fleet import NoCapacity, NoNode
from gateway.nodes.placement import Choice, Rejected
from gateway.nodes.streams import FleetPath
from gateway.services import Services
from policies.affinity import MAX_CHARS, find_signal, is_usable
from policies.pairing import Pairing
from policies.pairing import Reason as WhyPaired
from policies.routing import Affinity, Decision, Reason, Rejection, Scored


class RoutedBody(Struct, frozen=True):
    """As a client would send it to /v1/chat/completions, or with one prompt (a text, or token ids)
    to /v1/completions."""

    model: str
    messages: list[object] | None = None
    prompt: str | list[int] | None = None


class ExplainQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Of a dry run: whose key it has, and what x-session-affinity says beside the body."""

    tenant: Annotated[str, Meta(min_length=1)] = "default"
    session: Annotated[str, Meta(max_length=MAX_CHARS)] = ""


class RecentQuery(Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str


class CandidateAnswer(Struct, frozen=True):
    """cost_s is the sum of the four terms behind it; of the seconds to a first token, as far as
    they are known, queue_s pass in the gateway's queue. See docs/admin.md."""

    node_id: str
    engine: int
    is_chosen: bool
    is_home: bool
    cost_s: float
    backlog_s: float
    own_s: float
    fetch_s: float
    pressure_s: float
    hit_tokens: int
    uncached_tokens: int
    backlog_tokens: int
    tokens_per_s: float
    kv_share: float
    in_flight: int
    queue_s: float
    first_token_s: float


class RejectionAnswer(Struct, frozen=True):
    node_id: str
    why: Rejection


class PairingAnswer(Struct, frozen=True):
    """Why it is split or not; see docs/admin.md. Times are estimates in seconds, 0 where nothing
    was weighed. candidates: to compute the prompt for another node."""

    reason: WhyPaired
    prefill_node: str | None
    uncached_tokens: int
    whole_s: float
    split_s: float
    transfer_s: float
    spared_s: float
    candidates: tuple[CandidateAnswer, ...]


class DecisionAnswer(Struct, frozen=True):
    """decided_at: wall seconds; None: a dry run. node_id: None where no node can take it. path and
    pairing: None there too, and pairing in a fleet of mixed nodes."""

    decided_at: float | None
    node_id: str | None
    reason: Reason | Literal["no_node", "no_capacity"]
    retry_after_s: float | None
    prompt_tokens: int
    affinity: Affinity | None
    home: str | None
    candidates: tuple[CandidateAnswer, ...]
    rejected: tuple[RejectionAnswer, ...]
    path: FleetPath | None = None
    pairing: PairingAnswer | None = None


class Explanation(Struct, frozen=True):
    """One decision an attempt; request_id: None of a dry run."""

    request_id: str | None
    policy_version: str
    decisions: tuple[DecisionAnswer, ...]


_body = msgspec.json.Decoder(RoutedBody).decode


async def explain_recent(services: Services, exchange: Exchange) -> None:
    """Tell why a recent request went where it did: all candidates, their costs, the choice."""
    request_id = read_query(exchange, RecentQuery).request_id
    decided = services.fleet.decided(request_id)
    if not decided:
        raise GatewayError(
            "request_not_found",
            field="request_id",
            found=quote(request_id),
            allowed="one of the requests that this gateway sent to a node lately",
            remedy="take a newer x-request-id, or send the body here for a dry run",
        )
    now = time.time()
    decisions = [_told(choice, now - ago) for ago, choice in decided]
    await _reply(services, exchange, request_id, decisions)


async def explain(services: Services, exchange: Exchange) -> None:
    """Tell where a client's request would go now; nothing is sent or changed."""
    query = read_query(exchange, ExplainQuery)
    if query.session and not is_usable(query.session):
        raise refuse_field(
            "session",
            "characters that are not printable",
            "printable characters",
            "send the value as the client sends it",
        )
    asked = decoded(exchange.body, _body, needs="a client's request")
    limits = services.config.limits
    if asked.messages is not None:
        chat = read_chat_request(exchange.body, limits)
        served = find_served(services, exchange, chat.model)
        rendered = served.text.chat_prompt(chat.messages, chat.tools.functions)
        prompt = Prompt(await tokenised(services, served, "messages", rendered), "messages")
        sampling, hints = chat.sampling, chat.hints
    else:
        request = read_completion_request(exchange.body, limits)
        served = find_served(services, exchange, request.model)
        field, given = request.prompts[0]
        prompt = await read_prompt(services, served, field, given, has_echo=False)
        sampling, hints = request.sampling, request.hints
    headers = {"x-session-affinity": query.session} if query.session else {}
    dispatch = make_dispatch(
        services,
        served,
        prompt,
        sampling,
        request_id=exchange.request_id,
        tenant=query.tenant,
        session=session_key(query.tenant, served, find_signal(headers, hints)),
        max_tokens=1,
    )
    try:
        told = _told(services.fleet.explain(dispatch), None)
    except (NoCapacity, NoNode) as refusal:
        told = _refused(refusal, prompt)
    await _reply(services, exchange, None, [told])


async def _reply(
    services: Services,
    exchange: Exchange,
    request_id: str | None,
    decisions: Sequence[DecisionAnswer],
) -> None:
    await exchange.reply_json(Explanation(request_id, services.policy_version, tuple(decisions)))


def _told(choice: Choice, decided_at: float | None) -> DecisionAnswer:
    decision = choice.decision
    return DecisionAnswer(
        decided_at=decided_at,
        node_id=decision.chosen.candidate.node_id,
        reason=decision.reason,
        retry_after_s=None,
        prompt_tokens=decision.wanted.prompt_tokens,
        affinity=decision.affinity,
        home=decision.wanted.home,
        candidates=_candidates(decision),
        rejected=_rejected(decision.rejected),
        path=choice.path,
        pairing=None if choice.pairing is None else _pairing(choice.pairing, choice.prefill),
    )


def _pairing(pairing: Pairing, prefill: Decision | None) -> PairingAnswer:
    return PairingAnswer(
        reason=pairing.reason,
        prefill_node=prefill.chosen.candidate.node_id if prefill and pairing.is_split else None,
        uncached_tokens=pairing.uncached_tokens,
        whole_s=pairing.whole_s,
        split_s=pairing.split_s,
        transfer_s=pairing.transfer_s,
        spared_s=pairing.spared_s,
        candidates=() if prefill is None else _candidates(prefill),
    )


def _candidates(decision: Decision) -> tuple[CandidateAnswer, ...]:
    """The cheapest first."""
    return tuple(
        _candidate(one, decision) for one in sorted(decision.scored, key=lambda one: one.cost_s)
    )


def _candidate(one: Scored, decision: Decision) -> CandidateAnswer:
    candidate = one.candidate
    return CandidateAnswer(
        node_id=candidate.node_id,
        engine=candidate.engine,
        is_chosen=one is decision.chosen,
        is_home=candidate.node_id == decision.wanted.home,
        cost_s=one.cost_s,
        backlog_s=one.backlog_s,
        own_s=one.own_s,
        fetch_s=one.fetch_s,
        pressure_s=one.pressure_s,
        hit_tokens=one.hit_tokens,
        uncached_tokens=one.uncached_tokens,
        backlog_tokens=candidate.backlog_tokens,
        tokens_per_s=candidate.tokens_per_s,
        kv_share=candidate.kv_share,
        in_flight=candidate.in_flight,
        queue_s=one.queue_s,
        first_token_s=one.first_token_s,
    )


def _refused(refusal: NoCapacity | NoNode, prompt: Prompt) -> DecisionAnswer:
    is_full = isinstance(refusal, NoCapacity)
    return DecisionAnswer(
        decided_at=None,
        node_id=None,
        reason="no_capacity" if is_full else "no_node",
        retry_after_s=refusal.retry_after_s if isinstance(refusal, NoCapacity) else None,
        prompt_tokens=len(prompt.ids),
        affinity=None,
        home=None,
        candidates=(),
        rejected=_rejected(refusal.rejected),
    )


def _rejected(rejected: Sequence[Rejected]) -> tuple[RejectionAnswer, ...]:
    return tuple(RejectionAnswer(node_id, why) for node_id, why in rejected)
