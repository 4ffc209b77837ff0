"""`kagari admin …`: the operator's commands and flags, answered by a running gateway."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from gateway.cli.problem import FAILED

if TYPE_CHECKING:
    from gateway.cli.admin_call import Admin

AsJson = Annotated[bool, typer.Option("--json", help="The gateway's answer, as it is.")]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant.")]
KeyId = Annotated[str | None, typer.Option(help="Only the key with this id.")]
Model = Annotated[str | None, typer.Option(help="Only this model.")]

ANSWER_S = 10.0  # beside what the gateway was asked to wait
CONNECTION = ("--home", "--url", "--token", "--token-file")


class FlagsAnywhere(TyperGroup):
    """The connection's flags may stand behind a command's name too, where all others have them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags: list[str] = []
        others: list[str] = []
        left = deque(args)
        while left and left[0] != "--":
            word = left.popleft()
            name, is_whole, _ = word.partition("=")
            (flags if name in CONNECTION else others).append(word)
            if name in CONNECTION and not is_whole and left:
                flags.append(left.popleft())
        return super().parse_args(ctx, [*flags, *others, *left])


admin_app = typer.Typer(
    cls=FlagsAnywhere,
    help="Ask and steer a running gateway. Exit 0: done; 1: the answer is no, or nobody answers; "
    "2: change the command line or the token.",
    no_args_is_help=True,
)
keys_app = typer.Typer(help="API keys of a running gateway.", no_args_is_help=True)
prefixes_app = typer.Typer(
    help="Prompts that are kept computed on all nodes.", no_args_is_help=True
)
admin_app.add_typer(keys_app, name="keys")
admin_app.add_typer(prefixes_app, name="prefixes")


@admin_app.callback()
def connect(
    context: typer.Context,
    home: Annotated[
        Path | None, typer.Option(help="Home of the gateway (also KAGARI_HOME).")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Admin address; default: from home.")] = None,
    token: Annotated[str | None, typer.Option(help="Operator's token; default: from home.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token.")] = None,
) -> None:
    def admin() -> Admin:
        from gateway.cli.admin_call import find_admin

        return find_admin(home=home, url=url, token=token, token_file=token_file)

    context.obj = admin  # called by a command, so that its --help needs no gateway


@keys_app.command("list")
def keys_list(context: typer.Context, as_json: AsJson = False) -> None:
    """All keys, revoked ones too, oldest first."""
    from gateway.cli.admin_tables import show_keys

    admin: Admin = context.obj()
    keys = admin.pages("/keys", {}, "keys", limit=None)
    admin.show(keys, show_keys, as_json=as_json)


@keys_app.command("create")
def keys_create(
    context: typer.Context,
    name: str,
    tenant: Annotated[str, typer.Option(help="Who is billed and limited.")] = "default",
    ttft_deadline_ms: Annotated[
        int | None,
        typer.Option(help="Refuse requests whose first token would come later than this."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key; its secret is shown this once."""
    from gateway.cli.admin_tables import show_new_key

    admin: Admin = context.obj()
    body: dict[str, Any] = {"name": name, "tenant": tenant}
    if ttft_deadline_ms is not None:
        body["ttft_deadline_ms"] = ttft_deadline_ms
    made = admin.ask("POST", "/keys", body=body)
    admin.show(made, show_new_key, as_json=as_json)


@keys_app.command("show")
def keys_show(context: typer.Context, key: str, as_json: AsJson = False) -> None:
    """One key, by its id or a live one's name."""
    from gateway.cli.admin_tables import show_key

    admin: Admin = context.obj()
    admin.show(admin.ask("GET", "/keys", key), show_key, as_json=as_json)


@keys_app.command("rename")
def keys_rename(context: typer.Context, key: str, name: str, as_json: AsJson = False) -> None:
    """Give a live key another name; its id and its secret stay."""
    from gateway.cli.admin_tables import show_key

    admin: Admin = context.obj()
    renamed = admin.ask("PATCH", "/keys", key, body={"name": name})
    admin.show(renamed, show_key, as_json=as_json)


@keys_app.command("deadline")
def keys_deadline(
    context: typer.Context,
    key: str,
    ttft_deadline_ms: Annotated[
        int | None, typer.Argument(help="Milliseconds to the first token; leave it out for none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a key's requests whose first token would come later; without a number: never."""
    from gateway.cli.admin_tables import show_key

    admin: Admin = context.obj()
    body = {"ttft_deadline_ms": ttft_deadline_ms}
    admin.show(admin.ask("PATCH", "/keys", key, body=body), show_key, as_json=as_json)


@keys_app.command("revoke")
def keys_revoke(context: typer.Context, key: str, as_json: AsJson = False) -> None:
    """End a key, here at once and in other gateways of this home within a second."""
    from gateway.cli.admin_tables import show_key

    admin: Admin = context.obj()
    admin.show(admin.ask("DELETE", "/keys", key), show_key, as_json=as_json)


@admin_app.command()
def usage(
    context: typer.Context,
    by: Annotated[
        list[str] | None,
        typer.Option(help="day, tenant, key or model; repeat to combine. Default: day."),
    ] = None,
    since: Annotated[str | None, typer.Option("--from", help="First day, as 2026-01-31.")] = None,
    until: Annotated[str | None, typer.Option("--to", help="Last day.")] = None,
    tenant: Tenant = None,
    key: KeyId = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Requests, tokens, cached share, cost and what caching saved."""
    from gateway.cli.admin_tables import show_usage

    admin: Admin = context.obj()
    query = {"from": since, "to": until, "tenant": tenant, "key": key, "model": model}
    answer = admin.ask("GET", "/usage", query={"group_by": ",".join(by or ["day"]), **query})
    admin.show(answer, show_usage, as_json=as_json)


@admin_app.command()
def requests(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Most rows.")] = 50,
    since: Annotated[
        str | None, typer.Option("--from", help="Started at or after, as 2026-01-31T12:00:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option("--to", help="Started before.")] = None,
    tenant: Tenant = None,
    key: KeyId = None,
    model: Model = None,
    status: Annotated[
        Literal["open", "ok", "client_left", "failed", "orphaned"] | None,
        typer.Option(help="Only those that ended so."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rows of the ledger, newest first."""
    from gateway.cli.admin_tables import show_requests

    admin: Admin = context.obj()
    query = {"from": since, "to": until, "tenant": tenant, "key": key, "model": model}
    rows = admin.pages("/requests", {**query, "status": status}, "requests", limit=limit)
    admin.show(rows, show_requests, as_json=as_json)


@admin_app.command()
def request(context: typer.Context, request_id: str, as_json: AsJson = False) -> None:
    """One request: its row, its tries, and how its charge was worked out."""
    from gateway.cli.admin_tables import show_request

    admin: Admin = context.obj()
    admin.show(admin.ask("GET", "/requests", request_id), show_request, as_json=as_json)


@admin_app.command()
def upstreams(context: typer.Context, as_json: AsJson = False) -> None:
    """Foreign servers behind the gateway: their state and what runs there."""
    from gateway.cli.admin_tables import show_upstreams

    admin: Admin = context.obj()
    admin.show(admin.ask("GET", "/upstreams")["upstreams"], show_upstreams, as_json=as_json)


@admin_app.command()
def nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """Every node: state, load and pages of its engines."""
    from gateway.cli.admin_tables import show_nodes

    admin: Admin = context.obj()
    admin.show(admin.ask("GET", "/nodes")["nodes"], show_nodes, as_json=as_json)


@admin_app.command()
def node(context: typer.Context, node_id: str, as_json: AsJson = False) -> None:
    """One node."""
    from gateway.cli.admin_tables import show_nodes

    admin: Admin = context.obj()
    admin.show(
        admin.ask("GET", "/nodes", node_id), lambda found: show_nodes([found]), as_json=as_json
    )


@admin_app.command()
def drain(context: typer.Context, node_id: str, as_json: AsJson = False) -> None:
    """Send a node nothing new; what runs there goes on."""
    from gateway.cli.admin_tables import show_drain

    admin: Admin = context.obj()
    admin.show(admin.ask("POST", "/nodes", node_id, "drain"), show_drain, as_json=as_json)


@admin_app.command()
def undrain(context: typer.Context, node_id: str, as_json: AsJson = False) -> None:
    """Send a node new requests again."""
    from gateway.cli.admin_tables import show_drain

    admin: Admin = context.obj()
    admin.show(admin.ask("POST", "/nodes", node_id, "undrain"), show_drain, as_json=as_json)


@admin_app.command()
def role(
    context: typer.Context,
    node_id: str,
    role: Annotated[str, typer.Argument(help="mixed, prefill or decode.")],
    as_json: AsJson = False,
) -> None:
    """Give a node other work from now on; what runs there for the old one ends first."""
    from gateway.cli.admin_tables import show_role

    admin: Admin = context.obj()
    told = admin.ask("POST", "/nodes", node_id, "role", body={"role": role})
    admin.show(told, show_role, as_json=as_json)


@prefixes_app.command("list")
def prefixes_list(context: typer.Context, as_json: AsJson = False) -> None:
    """All that have not expired, oldest first."""
    from gateway.cli.admin_tables import show_prefixes

    admin: Admin = context.obj()
    admin.show(admin.ask("GET", "/prefixes")["prefixes"], show_prefixes, as_json=as_json)


@prefixes_app.command("show")
def prefixes_show(context: typer.Context, prefix_id: str, as_json: AsJson = False) -> None:
    """One, and what each node says of it."""
    from gateway.cli.admin_tables import show_prefix

    admin: Admin = context.obj()
    admin.show(admin.ask("GET", "/prefixes", prefix_id), show_prefix, as_json=as_json)


@prefixes_app.command("create")
def prefixes_create(
    context: typer.Context,
    name: str,
    model: Annotated[str, typer.Option(help="The model whose requests begin with it.")],
    file: Annotated[
        Path, typer.Option(help="JSON with messages (and tools) or prompt, as in a request's body.")
    ],
    tenant: Annotated[str, typer.Option(help="Whose requests share it.")] = "default",
    ttl_s: Annotated[float, typer.Option(help="Seconds to keep it.")] = 86_400.0,
    wait_s: Annotated[float, typer.Option(help="Longest wait for the nodes' answers.")] = 15.0,
    as_json: AsJson = False,
) -> None:
    """Pin a prompt on every node that serves the model, and on those that join later. Exit 1 while
    one lacks it: it is asked again."""
    from gateway.cli.admin_call import read_prompt
    from gateway.cli.admin_tables import show_prefix

    admin: Admin = context.obj()
    body = {"name": name, "model": model, "tenant": tenant, "ttl_s": ttl_s, "wait_s": wait_s}
    made = admin.ask(
        "POST", "/prefixes", body={**body, **read_prompt(file)}, patience_s=wait_s + ANSWER_S
    )
    admin.show(made, show_prefix, as_json=as_json)
    if made["state"] != "pinned":
        raise SystemExit(FAILED)


@prefixes_app.command("delete")
def prefixes_delete(context: typer.Context, prefix_id: str, as_json: AsJson = False) -> None:
    """Unpin: its pages are evicted as any others from now on."""
    from gateway.cli.admin_tables import show_deleted

    admin: Admin = context.obj()
    admin.show(admin.ask("DELETE", "/prefixes", prefix_id), show_deleted, as_json=as_json)


@admin_app.command()
def purge(
    context: typer.Context,
    tenant: str,
    wait_s: Annotated[float, typer.Option(help="Longest wait for the nodes' answers.")] = 15.0,
    as_json: AsJson = False,
) -> None:
    """Remove a tenant's pages from all tiers of all nodes. Exit 1 while something may be left."""
    from gateway.cli.admin_tables import show_purge

    admin: Admin = context.obj()
    told = admin.ask(
        "DELETE", "/tenants", tenant, "cache",
        query={"wait_s": str(wait_s)}, patience_s=wait_s + ANSWER_S,
    )  # fmt: skip
    admin.show(told, show_purge, as_json=as_json)
    if not told["complete"]:
        raise SystemExit(FAILED)


@admin_app.command()
def prices(context: typer.Context, as_json: AsJson = False) -> None:
    """The price table in force."""
    from gateway.cli.admin_tables import show_prices

    admin: Admin = context.obj()
    admin.show(admin.ask("GET", "/prices"), show_prices, as_json=as_json)


@admin_app.command()
def explain(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="A client's request as JSON: a dry run.")
    ] = None,
    request_id: Annotated[str | None, typer.Option("--request", help="A recent request.")] = None,
    tenant: Annotated[str, typer.Option(help="Of the dry run.")] = "default",
    session: Annotated[str | None, typer.Option(help="x-session-affinity of the dry run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Why a request went, or would go, to its node: every candidate and what it costs."""
    from gateway.cli.admin_call import misused, read_body
    from gateway.cli.admin_tables import show_explanation

    admin: Admin = context.obj()
    if file is None and request_id is not None:
        told = admin.ask("GET", "/routing/explain", query={"request_id": request_id})
    elif file is not None and request_id is None:
        query = {"tenant": tenant, "session": session}
        body = read_body(file, "FILE")
        told = admin.ask("POST", "/routing/explain", query=query, body=body)
    else:
        raise misused("FILE", "what names no one request", "FILE alone, or --request alone")
    admin.show(told, show_explanation, as_json=as_json)


@admin_app.command()
def sessions(
    context: typer.Context,
    value: Annotated[str | None, typer.Argument(help="What the client sent.")] = None,
    model: Annotated[str | None, typer.Option(help="The model it asked.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose key it had.")] = "default",
    digest: Annotated[str | None, typer.Option(help="`session` of a request's row.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find a session: its home, and where its prefix is resident."""
    from gateway.cli.admin_call import misused
    from gateway.cli.admin_tables import show_session

    admin: Admin = context.obj()
    if digest is not None and value is None:
        found = admin.ask("GET", "/sessions", digest)
    elif value is not None and model is not None and digest is None:
        body = {"value": value, "model": model, "tenant": tenant}
        found = admin.ask("POST", "/session-lookup", body=body)
    else:
        raise misused("VALUE", "what names no one session", "VALUE with --model, or --digest alone")
    admin.show(found, show_session, as_json=as_json)
