"""`kagari demo`: run the acts on real processes, show them as they happen, check their claims."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gateway.cli.client import ChatReply, HttpError, StreamFailed, stream_chat
from gateway.cli.problem import FAILED, Problem
from gateway.cli.usage import usd
from gateway.demo.acts import (
    Act,
    Return,
    Turn,
    affinity_act,
    discount_act,
    hit_rate,
    landing_act,
    mean_ttft_s,
    tiers_act,
)
from gateway.demo.landing import NUM_STREAMS, WAYS, play_landing, sparkline
from gateway.demo.returns import FLAGS, play_returns
from gateway.demo.scenario import (
    COMPLETION_TOKENS,
    NUM_AGENTS,
    POOL_TOKENS,
    Conversation,
    turn_order,
)
from gateway.demo.stack import Stack, StackFailed
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.requests import RequestLine, requests
from gateway.ledger.usage import usage_by

MODEL = "smollm2-135m"
PLACED_S = 30.0
STEPS = ("--step-tokens", "256")  # short, so that engines on a busy machine report in time
SETTLED_S = 10.0
BAR_CHARS = 40
# Tiers are act 4's matter: before it, pages leave for good.
NO_TIERS = ("--kv-host-mb", "0", "--kv-disk-mb", "0")
AFFINITY_FLAGS = ("--nodes", "2", "--kv-device-tokens", str(POOL_TOKENS), *STEPS, *NO_TIERS)
ONE_THREAD = ("--threads", "1", *NO_TIERS)

ROUND_ROBIN = "round robin"
AFFINITY = "affinity"


class Screen:
    """A table that grows on a terminal, plain lines elsewhere; all on stderr."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._live: Live | None = None
        self._table = Table()

    @contextmanager
    def turns(self, title: str) -> Iterator[None]:
        """Within this, `turn` adds rows to a table of that title."""
        self._table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for heading in ("agent", "turn", "node", "affinity"):
            self._table.add_column(heading)
        for heading in ("prompt", "cached", "first token", "cost USD"):
            self._table.add_column(heading, justify="right")
        if not self.console.is_terminal:
            self.console.print(f"\n{title}", highlight=False)
            yield
            return
        with Live(self._table, console=self.console, refresh_per_second=8) as self._live:
            yield
        self._live = None

    def turn(self, turn: Turn) -> None:
        reply = turn.reply
        share = reply.cached_tokens / reply.prompt_tokens
        colour = "green" if share > 0.8 else "yellow" if share > 0.4 else "red"
        cells = (
            turn.agent,
            str(turn.turn),
            reply.node,
            reply.affinity,
            f"{reply.prompt_tokens:,}",
            f"{reply.cached_tokens:,}",
            f"{reply.ttft_s:.2f} s",
            usd(turn.charge_nano_usd),
        )
        if self._live is None:
            self.console.print("  ".join(f"{cell:>9}" for cell in cells), highlight=False)
            return
        self._table.add_row(*cells[:5], f"[{colour}]{cells[5]}[/{colour}]", *cells[6:])

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def verdict(self, act: Act) -> None:
        for claim in act.claims:
            mark = "[green]holds[/green]" if claim.ok else "[red]fails[/red]"
            self.console.print(f"  {mark}  {claim.text}", highlight=False)


def run_demo(*, check: bool, as_json: bool, turns: int, landing_tokens: int) -> None:
    """All acts. With check, exit 1 when a claim fails; with as_json, one object on stdout.

    turns: of each agent in act 1; landing_tokens: of the prompt that lands in act 3.
    """
    screen = Screen()
    try:
        acts = play(screen, turns=turns, landing_tokens=landing_tokens)
    except StackFailed as error:
        raise Problem(
            "demo",
            found=str(error),
            allowed="a gateway and two nodes that start and answer",
            remedy="run kagari doctor, then the demo again with nothing else on the machine",
            exit_code=FAILED,
        ) from error
    if as_json:
        sys.stdout.write(json.dumps({"acts": [act.as_json() for act in acts]}) + "\n")
    if check and not all(act.ok for act in acts):
        raise SystemExit(FAILED)


def play(screen: Screen, *, turns: int, landing_tokens: int) -> list[Act]:
    """Each act on fresh nodes, act 2 from the ledger of act 1's second half."""
    screen.say(
        f"{NUM_AGENTS} agents, {turns} turns each, one system prompt for all; 2 nodes that "
        f"hold {POOL_TOKENS:,} tokens each. All on this machine, with {MODEL}."
    )
    with tempfile.TemporaryDirectory(prefix="kagari-demo-") as folder:
        with started(Path(folder, "before"), {"KAGARI_ROUTING__POLICY": "round_robin"}) as stack:
            before = conversations(stack, ROUND_ROBIN, turns, screen)
        with started(Path(folder, "after"), {}) as stack:
            after = conversations(stack, AFFINITY, turns, screen)
            ledger = stack.home / LEDGER_NAME
            lines = settled(ledger, len(after))
            total = usage_by(ledger, ())[0]
        landing = show_landing(Path(folder), screen, landing_tokens)
        with started(Path(folder, "returns"), {}, flags=("--nodes", "1", *STEPS, *FLAGS)) as stack:
            tiers = show_returns(stack, screen)
    affinity = affinity_act(before, after)
    screen.say("\nAct 1, affinity: what is already computed is found again")
    screen.say(
        f"  hit rate {hit_rate(before):.0%} → {hit_rate(after):.0%}, mean time to the first token "
        f"{mean_ttft_s(before):.2f} s → {mean_ttft_s(after):.2f} s"
    )
    screen.verdict(affinity)
    discount = discount_act(lines, total, [turn.reply for turn in after])
    screen.say("\nAct 2, discount: full price − cached discount = bill")
    show_discount(screen, discount)
    screen.verdict(discount)
    screen.say("\nAct 3, split: a prompt that lands does not hold up who is speaking")
    screen.verdict(landing)
    screen.say("\nAct 4, tiers: a conversation comes back from memory, from disk, from a kill")
    screen.verdict(tiers)
    return [affinity, discount, landing, tiers]


def started(
    home: Path, environment: dict[str, str], *, flags: tuple[str, ...] = AFFINITY_FLAGS
) -> Stack:
    """Nodes with cold caches and a ledger of their own, on free ports."""
    return Stack(home, "--port", "0", "--model", MODEL, *flags, environment=environment)


def show_landing(folder: Path, screen: Screen, prompt_tokens: int) -> Act:
    """A line for each way: what a token took beside the prompt, from landing to first token."""
    screen.say(
        f"\n{NUM_STREAMS} streams run, a prompt of {prompt_tokens:,} tokens lands: ms per token "
        f"beside it, until its own first token (logarithmic; blank: all is said)"
    )
    landings = []
    for way in WAYS:
        with started(folder / way.name, way.environment, flags=(*way.flags, *ONE_THREAD)) as stack:
            landing = play_landing(stack, way, prompt_tokens=prompt_tokens)
        landings.append(landing)
        screen.say(
            f"  {way.name:>16}  {sparkline(landing)}  p90 {landing.p90_ms():6,.0f} ms, "
            f"first in {landing.prompt.ttft_s:4.1f} s"
        )
    return landing_act(landings)


def show_returns(stack: Stack, screen: Screen) -> Act:
    """A bar for each return, as long as its time to the first token."""
    screen.say("\nA conversation comes back: time to its first token")
    cold_s = 0.0

    def tell(one: Return) -> None:
        nonlocal cold_s
        ttft_s = one.reply.ttft_s
        cold_s = cold_s or ttft_s
        bar = "█" * max(1, round(BAR_CHARS * min(1.0, ttft_s / cold_s)))
        found = ", ".join(f"{tokens:,} from {tier}" for tier, tokens in one.tiers.items())
        screen.say(f"  {one.tier:>6}  {bar:<{BAR_CHARS}}  {ttft_s:6.2f} s  {found or 'computed'}")

    returns, killed = play_returns(stack, tell)
    return tiers_act(returns, killed)


def conversations(stack: Stack, routing: str, num_turns: int, screen: Screen) -> list[Turn]:
    """All turns of all agents: in each all ask together, in an order that shifts from turn to turn:
    each once the one before has its place.

    Together, because a second prompt that shares a prefix is sent behind the first unless its node
    has much to do: agents that come one by one would share one node.
    """
    agents = [Conversation(agent) for agent in range(NUM_AGENTS)]
    title = {
        ROUND_ROBIN: "Before: nodes in turn, no session header",
        AFFINITY: "After: x-session-affinity, and nodes chosen by what they hold",
    }[routing]
    screen.say("\n" + measured(stack))
    ledger = stack.home / LEDGER_NAME
    turns: list[Turn] = []
    with screen.turns(title), ThreadPoolExecutor(NUM_AGENTS) as pool:
        for turn in range(1, num_turns + 1):
            order = [agents[agent] for agent in turn_order(turn)]
            waiting = []
            for conversation in order:
                messages = list(conversation.ask(turn))
                header = routing == AFFINITY
                waiting.append(pool.submit(ask, stack, conversation, messages, header))
                wait_placed(ledger, len(turns) + len(waiting), waiting[-1])
            try:
                replies = [future.result(timeout=300) for future in waiting]
            except (StreamFailed, HttpError, OSError) as error:
                raise StackFailed(f"{error}\n    {stack.warnings()}") from error
            charges = charges_of(ledger, replies)
            for conversation, reply in zip(order, replies, strict=True):
                conversation.hear(reply.text)
                done = Turn(routing, conversation.name, turn, reply, charges[reply.request_id])
                turns.append(done)
                screen.turn(done)
    return turns


def wait_placed(ledger: Path, count: int, asked: Future[ChatReply]) -> None:
    """Until so many requests have their rows: a row is opened once it is known where it runs."""
    deadline = time.monotonic() + PLACED_S
    while not asked.done() and sum(1 for _ in requests(ledger)) < count:
        if time.monotonic() > deadline:
            raise StackFailed(f"request {count} found no node within {PLACED_S:.0f} s")
        time.sleep(0.005)


def measured(stack: Stack) -> str:
    """The rates by which prompts are placed."""
    rates = {
        node["node_id"]: node["engines"][0]["info"]["prefill_tokens_per_s"]
        for node in stack.nodes()
    }
    told = (f"{node} {rate:,.0f}" for node, rate in sorted(rates.items()))
    return "prefill tokens/s at the start: " + ", ".join(told)


def ask(
    stack: Stack, conversation: Conversation, messages: list[dict[str, str]], header: bool
) -> ChatReply:
    body = {
        "model": stack.model,
        "messages": messages,
        "max_tokens": COMPLETION_TOKENS,
        "temperature": 0,
    }
    headers = {"x-session-affinity": f"demo-{conversation.name}"} if header else {}
    return stream_chat(stack.api, body, headers)


def charges_of(ledger: Path, replies: Sequence[ChatReply]) -> dict[str, int]:
    """nano-USD by request id; a row settles within 100 ms of its request's end."""
    wanted = {reply.request_id for reply in replies}
    deadline = time.monotonic() + SETTLED_S
    while True:
        found = {
            line.request_id: line.charge_nano_usd
            for line in requests(ledger)
            if line.request_id in wanted and line.status == "ok"
        }
        if len(found) == len(wanted) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if missing := wanted - found.keys():
        raise Problem(
            "ledger",
            found=f"{len(missing)} of {len(wanted)} requests not settled after {SETTLED_S:.0f} s",
            allowed="every ended request settled within 100 ms",
            remedy="run kagari ledger verify",
            exit_code=FAILED,
        )
    return found


def settled(ledger: Path, count: int) -> list[RequestLine]:
    lines = list(requests(ledger))
    if len(lines) != count:
        raise Problem(
            "ledger",
            found=f"{len(lines)} rows",
            allowed=f"{count}, one for each request",
            remedy="run kagari ledger verify",
            exit_code=FAILED,
        )
    return lines


def show_discount(screen: Screen, act: Act) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("request")
    for heading in ("prompt", "cached", "full USD", "− discount", "= bill"):
        table.add_column(heading, justify="right")
    for row in act.rows:
        table.add_row(
            row["request_id"][-12:],
            str(row.get("prompt_tokens", "")),
            str(row.get("cached_tokens", "")),
            usd(row["full_nano_usd"]),
            usd(row["discount_nano_usd"]),
            usd(row["bill_nano_usd"]),
        )
    screen.console.print(table)
