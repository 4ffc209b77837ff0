"""What each act claims, decided from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gateway.cli.client import ChatReply
from gateway.demo.landing import COARSE, FINE, SPLIT, Landing
from gateway.ledger.requests import RequestLine
from gateway.ledger.usage import UsageLine
from policies.contract.wire import Usage
from policies.pricing import charge

CLEAR_MARGIN = 0.15  # of the hit rate, which is cached ÷ prompt tokens
FOUND = 0.9  # of the prompt, in the cache when a conversation comes back
SMOOTHER = {COARSE.name: 3.0, FINE.name: 1.5}  # its time per token, p90, ÷ that of split
QUICKER = 4.0  # cold ÷ warm time to the first token, on a machine that may be busy


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one agent, as the client and the ledger saw it."""

    routing: str
    agent: str
    turn: int
    reply: ChatReply
    charge_nano_usd: int


@dataclass(frozen=True, slots=True)
class Return:
    """One return of a conversation. tier: where its pages were to be; tiers: the ledger's word on
    its cached tokens."""

    tier: str
    reply: ChatReply
    tiers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Killed:
    """What became of the stream whose node was killed, and when the node served again."""

    error: str
    status: str
    charge_nano_usd: int
    back_s: float


@dataclass(frozen=True, slots=True)
class Claim:
    """timed: about how long something took, so that a busy machine may refute it."""

    text: str
    ok: bool
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Act:
    name: str
    rows: list[dict[str, Any]]
    claims: list[Claim]

    @property
    def ok(self) -> bool:
        return all(claim.ok for claim in self.claims)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.ok,
            "rows": self.rows,
            "claims": [asdict(claim) for claim in self.claims],
        }


def hit_rate(turns: Sequence[Turn]) -> float:
    prompt = sum(turn.reply.prompt_tokens for turn in turns)
    return sum(turn.reply.cached_tokens for turn in turns) / prompt if prompt else 0.0


def mean_ttft_s(turns: Sequence[Turn]) -> float:
    return sum(turn.reply.ttft_s for turn in turns) / len(turns) if turns else 0.0


def affinity_act(before: Sequence[Turn], after: Sequence[Turn]) -> Act:
    """Round robin without a header, then our routing with it, on the same conversations."""
    stayed, later = turns_at_home(after)
    nodes = {turn.reply.node for turn in after}
    hits = (hit_rate(before), hit_rate(after))
    margin = f"at least {CLEAR_MARGIN * 100:.0f} points more"
    costs = (total_charge(before), total_charge(after))
    claims = [
        Claim(
            f"hit rate {hits[0]:.0%} → {hits[1]:.0%}, {margin}",
            hits[1] >= hits[0] + CLEAR_MARGIN,
        ),
        Claim(
            f"{stayed} of {later} later turns ran on the node of the turn before",
            0 < stayed == later,
        ),
        Claim(f"{len(nodes)} nodes worked", len(nodes) > 1),
        Claim(f"bill {costs[0]:,} → {costs[1]:,} nano-USD", costs[1] < costs[0]),
    ]
    return Act("affinity", [turn_row(turn) for turn in (*before, *after)], claims)


def turns_at_home(turns: Sequence[Turn]) -> tuple[int, int]:
    """(turns on the same node as the agent's turn before, turns that had one before)."""
    home_by_agent: dict[str, str] = {}
    stayed = later = 0
    for turn in turns:
        home = home_by_agent.get(turn.agent)
        later += home is not None
        stayed += home == turn.reply.node
        home_by_agent[turn.agent] = turn.reply.node
    return stayed, later


def total_charge(turns: Sequence[Turn]) -> int:
    return sum(turn.charge_nano_usd for turn in turns)


def turn_row(turn: Turn) -> dict[str, Any]:
    return {
        "routing": turn.routing,
        "agent": turn.agent,
        "turn": turn.turn,
        "node": turn.reply.node,
        "affinity": turn.reply.affinity,
        "prompt_tokens": turn.reply.prompt_tokens,
        "cached_tokens": turn.reply.cached_tokens,
        "completion_tokens": turn.reply.completion_tokens,
        "ttft_s": round(turn.reply.ttft_s, 4),
        "charge_nano_usd": turn.charge_nano_usd,
    }


def discount_act(lines: Sequence[RequestLine], total: UsageLine, told: Sequence[ChatReply]) -> Act:
    """Full price less cached discount is the bill: for each row, for the sums, for the client."""
    rows = [discount_row(line) for line in lines]
    sums = {
        name: sum(row[name] for row in rows)
        for name in ("full_nano_usd", "discount_nano_usd", "bill_nano_usd")
    }
    tokens_by_request = {line.request_id: tokens_of(line) for line in lines}
    claims = [
        Claim(
            "every row: full price − cached discount = bill, by its tokens and rates",
            bool(rows) and all(row["balances"] for row in rows),
        ),
        Claim(
            "sums of the rows = the ledger's totals, to the nano-USD",
            (sums["bill_nano_usd"], sums["discount_nano_usd"])
            == (total.charge_nano_usd, total.saved_nano_usd)
            and sums["full_nano_usd"] - sums["discount_nano_usd"] == sums["bill_nano_usd"],
        ),
        Claim(
            "the client was told the same tokens as the ledger",
            all(
                tokens_by_request.get(reply.request_id)
                == (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens)
                for reply in told
            ),
        ),
        Claim(
            f"caching saved {sums['discount_nano_usd']:,} nano-USD", sums["discount_nano_usd"] > 0
        ),
    ]
    return Act("discount", [*rows, {"request_id": "sum", **sums}], claims)


def tokens_of(line: RequestLine) -> tuple[int, int, int]:
    return line.prompt_tokens, line.cached_tokens, line.completion_tokens


def discount_row(line: RequestLine) -> dict[str, Any]:
    """The bill worked out again here, beside the one in the ledger."""
    right = charge(Usage(*tokens_of(line)), line.rates)
    by_hand = (
        (line.prompt_tokens - line.cached_tokens) * line.rates.input
        + line.cached_tokens * line.rates.cached
        + line.completion_tokens * line.rates.output
    )
    return {
        "request_id": line.request_id,
        "prompt_tokens": line.prompt_tokens,
        "cached_tokens": line.cached_tokens,
        "completion_tokens": line.completion_tokens,
        "full_nano_usd": right.full,
        "discount_nano_usd": right.discount,
        "bill_nano_usd": line.charge_nano_usd,
        "balances": line.charge_nano_usd == right.full - right.discount == (by_hand + 500) // 1000,
    }


def landing_act(landings: Sequence[Landing]) -> Act:
    """A prompt that lands among running streams: they wait for it, or are split from it."""
    p90_by_way = {one.way: one.p90_ms() for one in landings}
    *mixed, split = landings
    claims = [
        Claim(
            f"p90 of a token's time {p90_by_way[way]:,.0f} → {p90_by_way[SPLIT.name]:,.0f} ms: "
            f"better than {way} by at least {least}",
            p90_by_way[way] >= least * p90_by_way[SPLIT.name],
            timed=True,
        )
        for way, least in SMOOTHER.items()
    ]
    claims += [
        Claim(
            "the same answers, byte for byte",
            len({one.answers() for one in landings}) == 1 and all(split.answers()),
        ),
        Claim(
            f"split: {split.prompt.prefill_node} computed the prompts, {split.prompt.node} "
            f"continued all of them",
            all(
                (one.path, one.node, one.prefill_node)
                == ("split", split.prompt.node, split.prompt.prefill_node)
                for one in (*split.streams, split.prompt)
            )
            and split.prompt.prefill_node not in ("", split.prompt.node),
        ),
        Claim(
            "mixed: each prompt was computed and continued by one node",
            all(
                (reply.path, reply.prefill_node) == ("mixed", "")
                for one in mixed
                for reply in (*one.streams, one.prompt)
            ),
        ),
    ]
    return Act("landing", [landing_row(one) for one in landings], claims)


def landing_row(one: Landing) -> dict[str, Any]:
    spent = one.ms_per_token()
    return {
        "way": one.way,
        "path": one.prompt.path,
        "node": one.prompt.node,
        "prefill_node": one.prompt.prefill_node,
        "prompt_tokens": one.prompt.prompt_tokens,
        "ttft_s": round(one.prompt.ttft_s, 4),
        "streams_beside": len(one.beside),
        "tokens_beside": len(spent),
        "ms_per_token_p50": round(median(spent), 2),
        "ms_per_token_p90": round(one.p90_ms(), 2),
    }


def tiers_act(returns: Sequence[Return], killed: Killed) -> Act:
    """The first return is cold; each later one is quicker, and says the same."""
    cold, *later = returns
    claims = [Claim("cold: nothing of it was cached", cold.reply.cached_tokens == 0)]
    for one in later:
        reply, quicker = one.reply, cold.reply.ttft_s / one.reply.ttft_s
        from_tier = one.tiers.get(one.tier, 0)
        claims += [
            Claim(
                f"{one.tier}: {reply.cached_tokens:,} of {reply.prompt_tokens:,} tokens found, "
                f"{from_tier:,} there",
                reply.cached_tokens >= FOUND * reply.prompt_tokens
                and from_tier > reply.cached_tokens / 2
                and sum(one.tiers.values()) == reply.cached_tokens,
            ),
            Claim(f"{one.tier}: {quicker:.1f} x quicker than cold", quicker >= QUICKER, timed=True),
        ]
    answers = {one.reply.text for one in returns}
    claims += [
        Claim("the same answer from every tier", len(answers) == 1 and answers != {""}),
        Claim(
            f"killed in the middle: the stream ended in an error and cost nothing; the node was "
            f"back in {killed.back_s:.1f} s",
            bool(killed.error) and (killed.status, killed.charge_nano_usd) == ("failed", 0),
        ),
    ]
    return Act("tiers", [return_row(one, cold) for one in returns], claims)


def return_row(one: Return, cold: Return) -> dict[str, Any]:
    return {
        "tier": one.tier,
        "node": one.reply.node,
        "prompt_tokens": one.reply.prompt_tokens,
        "cached_tokens": one.reply.cached_tokens,
        "tiers": dict(one.tiers),
        "ttft_s": round(one.reply.ttft_s, 4),
        "times_quicker": round(cold.reply.ttft_s / one.reply.ttft_s, 2),
    }
