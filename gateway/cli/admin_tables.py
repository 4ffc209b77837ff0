"""The operator's answers as tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from gateway.cli.keys import when
from gateway.cli.tables import plain_table, print_table
from gateway.cli.usage import usd

TROUBLES = ("corrupt_pages", "timeouts")  # of a tier


def show_keys(keys: Sequence[Any]) -> None:
    table = plain_table("id", "name", "tenant", "created", "revoked", "TTFT ms")
    for key in keys:
        moments = when(key["created_at"]), when(key["revoked_at"])
        limit = key["ttft_deadline_ms"]
        shown = "-" if limit is None else f"{limit:,}"
        table.add_row(key["key_id"], key["name"], key["tenant"], *moments, shown)
    print_table(table)


def show_key(key: Any) -> None:
    show_keys([key])


def show_new_key(key: Any) -> None:
    show_keys([key])
    sys.stdout.write(f"{key['secret']}\nThe secret is not shown again.\n")


def show_usage(answer: Any) -> None:
    fields = {"day": "day", "tenant": "tenant", "key": "key_id", "model": "model"}
    figures = ("requests", "failed", "prompt", "cached", "share", "completion", "cost USD")
    table = plain_table(*answer["group_by"], *figures, "saved USD", show_footer=True)
    for line in answer["lines"]:
        table.add_row(*(line[fields[group]] for group in answer["group_by"]), *_figures(line))
    footer = ["total", *[""] * (len(answer["group_by"]) - 1), *_figures(answer["total"])]
    for column, text in zip(table.columns, footer, strict=True):
        column.footer = text
    print_table(table)
    if answer["is_cut"]:
        sys.stdout.write(f"the first {len(answer['lines'])} groups; the total is of all\n")


def _figures(line: Any) -> tuple[str, ...]:
    return (
        str(line["requests"]),
        str(line["failed"]),
        f"{line['prompt_tokens']:,}",
        f"{line['cached_tokens']:,}",
        f"{line['cached_share']:.0%}",
        f"{line['completion_tokens']:,}",
        usd(line["charge_nano_usd"]),
        usd(line["saved_nano_usd"]),
    )


def show_requests(rows: Sequence[Any]) -> None:
    table = plain_table(
        *("request", "started", "key", "model", "status", "node"),
        *("prompt", "cached", "completion", "USD"),
    )
    for row in rows:
        table.add_row(
            row["request_id"],
            when(row["started_at"]),
            row["key_id"],
            row["model"],
            row["status"],
            _places(row),
            str(row["prompt_tokens"]),
            str(row["cached_tokens"]),
            str(row["completion_tokens"]),
            usd(row["charge_nano_usd"]),
        )
    print_table(table)


def _places(row: Any) -> str:
    """The node that answered; of a split the one that computed the prompt in front of it."""
    names = (row.get("prefill_node"), row["node"])
    return " > ".join([name for name in names if name]) or "-"


def show_request(row: Any) -> None:
    show_requests([row])
    sums = row["arithmetic"]
    table = plain_table("tokens", "", "pico-USD a token", "pico-USD")
    for term in sums["terms"]:
        rate, amount = f"x {term['rate_pico_usd']:,}", f"{term['pico_usd']:,}"
        table.add_row(str(term["tokens"]), term["what"], rate, amount)
    table.add_row("", "", "sum", f"{sums['pico_usd']:,}")
    print_table(table)
    sys.stdout.write(
        f"rounded half up to nano-USD: {usd(sums['charge_nano_usd'])} USD; "
        f"without the cache {usd(sums['full_nano_usd'])}, saved {usd(sums['saved_nano_usd'])}\n"
        f"prices {row['price_version']}, policy {row['policy_version']}, "
        f"session {row['session'] or '-'}, first token {_seconds(row['ttft_s'])}\n"
    )
    for one in row["attempts"]:
        sys.stdout.write(f"try {one['attempt']} on {_places(one)}: {one['outcome']}\n")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"after {value:.3f} s"


def show_nodes(nodes: Sequence[Any]) -> None:
    table = plain_table(
        *("node", "state", "role", "in flight", "report", "model", "engine"),
        *(
            "waiting",
            "running",
            "backlog",
            "queued",
            "pages held",
            "cached",
            "free",
            "resident",
            "pinned",
            "slower tiers",
        ),
    )
    for node in nodes:
        own: tuple[str, ...] = (
            *(node["node_id"], node["state"], _role(node)),
            *(str(node["in_flight"]), f"{node['report_age_s']:.1f} s"),
        )
        for engine in node["engines"] or [None]:
            table.add_row(*own, *_engine_cells(engine))
            own = ("",) * len(own)
    print_table(table)


def _role(node: Any) -> str:
    soon = node["next_role"]
    return str(node["role"]) if soon is None else f"{node['role']}, soon {soon}"


def _engine_cells(engine: Any) -> tuple[str, ...]:
    if engine is None:
        return ()
    report = engine["report"] or {}
    names = ("waiting_sequences", "running_sequences")
    pages = ("pages_held", "pages_cached", "pages_free")
    info = engine["info"]
    return (
        info["model"] if info["compute"] == "exact" else f"{info['model']} ({info['compute']})",
        report.get("state", "-"),
        *(str(report.get(name, "-")) for name in names),
        str(engine["backlog_tokens"]),
        str(engine["queued_requests"]),
        *(str(report.get(name, "-")) for name in pages),
        str(engine["resident_pages"]),
        str(report.get("pages_pinned", "-")),
        ", ".join(map(_tier, report.get("tiers", ()))) or "-",
    )


def _tier(tier: Any) -> str:
    """Such as "disk 12/700", and what is wrong with it."""
    total = tier["pages_total"] or "?"
    troubles = [tier["state"]] if tier["state"] != "ok" else []
    troubles += [f"{tier[name]} {name.removesuffix('_pages')}" for name in TROUBLES if tier[name]]
    told = f" ({', '.join(troubles)})" if troubles else ""
    return f"{tier['tier']} {tier['pages_used']}/{total}{told}"


def show_explanation(told: Any) -> None:
    """Costs and their terms in seconds, the least first."""
    terms = ("cost_s", "backlog_s", "own_s", "fetch_s", "pressure_s")
    for attempt, decision in enumerate(told["decisions"], 1):
        chosen = decision["node_id"] or "nowhere"
        sys.stdout.write(
            f"attempt {attempt}: {chosen}, {decision['reason']}; {decision['prompt_tokens']:,}"
            f" tokens, affinity {decision['affinity'] or '-'}, home {decision['home'] or '-'}\n"
        )
        table = plain_table(
            "", "node", "engine", *(term.removesuffix("_s") for term in terms), "hit", "uncached",
            "ahead", "in flight", "queue", "first token",
        )  # fmt: skip
        for one in decision["candidates"]:
            table.add_row(
                "*" if one["is_chosen"] else "",
                one["node_id"] + (" (home)" if one["is_home"] else ""),
                str(one["engine"]),
                *(f"{one[term]:.3f}" for term in terms),
                f"{one['hit_tokens']:,}",
                f"{one['uncached_tokens']:,}",
                f"{one['backlog_tokens']:,}",
                str(one["in_flight"]),
                *(f"{one[term]:.3f}" for term in ("queue_s", "first_token_s")),
            )
        print_table(table)
        for one in decision["rejected"]:
            sys.stdout.write(f"{one['node_id']} not: {one['why']}\n")
        if (pairing := decision["pairing"]) is not None:
            times = [f"{pairing[name]:.3f} s" for name in ("whole_s", "split_s", "spared_s")]
            sys.stdout.write(
                f"{decision['path']}, {pairing['reason']}: {pairing['uncached_tokens']:,} uncached"
                f" tokens; first token in {times[0]} whole, in {times[1]} by a pair, which spares"
                f" {times[2]}; prefill {pairing['prefill_node'] or '-'}\n"
            )


def show_upstreams(servers: Sequence[Any]) -> None:
    table = plain_table(
        *("server", "dialect", "role", "state", "in flight", "backlog", "pages", "models"),
        "problem",
    )
    for one in servers:
        table.add_row(
            one["name"],
            one["dialect"],
            one["role"],
            one["state"],
            f"{one['in_flight']}/{one['max_in_flight']}",
            str(one["outstanding_tokens"]),
            f"{one['resident_pages']} {one['residency']}",
            ", ".join(one["models"]) or "-",
            one["problem"],
        )
    print_table(table)


def show_drain(answer: Any) -> None:
    is_draining = answer["draining"]
    done = "takes nothing new" if is_draining else "is chosen again"
    sys.stdout.write(f"{answer['node_id']} {done}\n")


def show_role(answer: Any) -> None:
    sys.stdout.write(f"{answer['node_id']} is {_role(answer)}\n")


def show_prefixes(prefixes: Sequence[Any]) -> None:
    table = plain_table(
        *("id", "name", "tenant", "model", "state", "nodes", "tokens", "pages", "expires")
    )
    for one in prefixes:
        pinned = sum([node["state"] == "pinned" for node in one["nodes"]])
        table.add_row(
            one["prefix_id"],
            one["name"],
            one["tenant"],
            one["model"],
            one["state"],
            f"{pinned} of {len(one['nodes'])}",
            f"{one['tokens']:,}",
            str(one["pages"]),
            when(one["expires_at"]),
        )
    print_table(table)


def show_prefix(prefix: Any) -> None:
    show_prefixes([prefix])
    for node in prefix["nodes"]:
        why = f": {node['code']}, {node['message']}" if node["code"] else ""
        sys.stdout.write(
            f"{node['node_id']} engine {node['engine']}: {node['state']},"
            f" {node['pages']} pages{why}\n"
        )


def show_deleted(prefix: Any) -> None:
    sys.stdout.write(f"{prefix['prefix_id']} ({prefix['name']}) is not pinned any more\n")


def show_purge(answer: Any) -> None:
    table = plain_table("node", "engine", "model", "state", "pages removed", "may be left in")
    for node in answer["nodes"]:
        table.add_row(
            node["node_id"],
            str(node["engine"]),
            node["model"],
            node["state"],
            str(node["pages"]),
            ", ".join(node["left"]) or "-",
        )
    print_table(table)
    removed = f"{answer['pages']} pages and {answer['prefixes_removed']} prefixes"
    rest = "nothing is left" if answer["complete"] else "the rest goes on, also for nodes away"
    sys.stdout.write(f"{answer['tenant']}: {removed} removed; {rest}\n")


def show_prices(answer: Any) -> None:
    table = plain_table("model", "input", "cached", "output", "date", "source")
    for name, line in [*answer["models"].items(), ("any other", answer["default"])]:
        usd_per_million = line["usd_per_million_tokens"]
        rates = (usd_per_million[what] for what in ("input", "cached", "output"))
        table.add_row(name, *rates, line["date"], line["source"])
    print_table(table)
    sys.stdout.write(f"USD per 1,000,000 tokens; version {answer['version']}, {answer['origin']}\n")


def show_session(answer: Any) -> None:
    idle_s = max(0.0, time.time() - answer["last_seen"])
    places = ", ".join(
        f"{one['node_id']} engine {one['engine']} ({', '.join(one['tiers'])})"
        for one in answer["resident"]
    )
    sys.stdout.write(
        f"session   {answer['session']}\n"
        f"home      {answer['home']} since {when(answer['home_since'])}\n"
        f"last seen {when(answer['last_seen'])}, {idle_s:.0f} s ago\n"
        f"resident  {places or 'nowhere that is known'}"
        f" ({answer['prompt_pages']} pages of its last prompt)\n"
    )
