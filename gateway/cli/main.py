"""The command `kagari`: its commands and flags; what they do is imported when they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from gateway.cli.admin import admin_app
from gateway.cli.problem import FAILED, Problem
from gateway.demo.scenario import NUM_TURNS

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Home = Annotated[
    Path | None, typer.Option(help="Folder of keys, ledger and logs (also KAGARI_HOME).")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]

app = typer.Typer(
    help="Kagari: a self-hosted LLM inference edge for agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="The models this machine holds or can fetch.", no_args_is_help=True)
keys_app = typer.Typer(help="API keys.", no_args_is_help=True)
ledger_app = typer.Typer(help="The book of every token.", no_args_is_help=True)
config_app = typer.Typer(help="The configuration file.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(keys_app, name="keys")
app.add_typer(ledger_app, name="ledger")
app.add_typer(config_app, name="config")
app.add_typer(admin_app, name="admin")


def main() -> None:
    """The entry of the `kagari` script. Exit 0: done; 1: the answer is no; 2: change something."""
    try:
        app()
    except Problem as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(problem.exit_code)
    except BrokenPipeError:  # `kagari usage | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        sys.stdout.write(f"kagari {version_of('kagari')}\n")
        raise typer.Exit


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Catalogue name or local folder; repeat for several."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Node agents to start, named n1…nN; default: one.")
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(help="Instead: so many that compute prompts, and")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="so many that decode.")] = None,
    split: Annotated[
        str | None, typer.Option(help="auto (where it pays), always or never; needs those two.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API; 0: a free one.")] = 8000,
    link_port: Annotated[int, typer.Option(help="Port nodes dial; 0: a free one.")] = 0,
    admin_port: Annotated[int, typer.Option(help="Port of the operator; 0: a free one.")] = 0,
    home: Home = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of the gateway.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Use this key (16 or more chars).")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cuda or cpu.")] = None,
    compute: Annotated[
        str | None, typer.Option(help="exact or fast; this and the next two also as ROLE=VALUE,…")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of weights: auto, bf16 or fp32.")] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Of pages: auto, bf16, fp32, fp8 or int8; or prefill=bf16,decode=int8."),
    ] = None,
    kv_device_tokens: Annotated[
        int | None, typer.Option(help="Tokens the KV pool of each engine holds.")
    ] = None,
    kv_host_mb: Annotated[
        int | None, typer.Option(help="Memory for pages beside the pool, each engine; 0: none.")
    ] = None,
    kv_disk_mb: Annotated[
        int | None, typer.Option(help="Disk for pages, each engine; 0: none.")
    ] = None,
    kv_disk_dir: Annotated[
        Path | None, typer.Option(help="Folder of pages on disk; default: kv in home.")
    ] = None,
    cluster_store: Annotated[
        str | None, typer.Option(help="Pages shared by nodes: mooncake://HOST:PORT.")
    ] = None,
    transfer: Annotated[
        str | None, typer.Option(help="Pages of a split go by: auto, tcp or mooncake.")
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="Most tokens an engine computes in one step.")
    ] = None,
    overlap: Annotated[
        str | None, typer.Option(help="on: plan a step while another computes.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each engine.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="Answer from this script file instead of a model.")
    ] = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(help="URL of a foreign server; repeat. Without --model no node is started."),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option(help="Of the upstreams: openai, vllm or sglang.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the tokenizer of the upstreams' model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a gateway and its nodes here; Ctrl-C drains, a second one kills."""
    from gateway.cli.home import home_folder, prepare_home, secret_file
    from gateway.cli.serve import serve as run
    from gateway.cli.serve_key import serve_key
    from gateway.cli.serve_plan import ServeOptions, require_split

    require_split(split)
    folder = prepare_home(home_folder(home))
    key_file, secret = serve_key(folder, literal=api_key, file=api_key_file)
    join_token_file = folder / "join.token"
    secret_file(join_token_file)
    flags = {
        "--device": device,
        "--compute": compute,
        "--dtype": dtype,
        "--kv-dtype": kv_dtype,
        "--kv-device-tokens": kv_device_tokens,
        "--kv-host-mb": kv_host_mb,
        "--kv-disk-mb": kv_disk_mb,
        "--kv-disk-dir": kv_disk_dir,
        "--cluster-store": cluster_store,
        "--transfer": transfer,
        "--step-tokens": step_tokens,
        "--overlap": overlap,
    }
    said = {"--dialect": dialect, "--tokenizer": tokenizer}
    options = ServeOptions(
        home=folder,
        models=tuple(model or ()),
        num_nodes=nodes,
        num_prefill=prefill,
        num_decode=decode,
        split=split,
        host=host,
        port=port,
        link_port=link_port,
        admin_port=admin_port,
        config=config,
        key_file=key_file,
        join_token_file=join_token_file,
        threads=threads,
        script=script,
        engine_flags=given(flags),
        upstreams=tuple(upstream or ()),
        upstream_flags=given(said),
    )
    run(options, secret=secret, as_json=as_json)


def given(flags: Mapping[str, object]) -> tuple[str, ...]:
    """Flags with their values, for a child; those that were not given are left out."""
    named = [(flag, str(value)) for flag, value in flags.items() if value is not None]
    return tuple(part for pair in named for part in pair)


@app.command(context_settings=PASS_ON)
def gateway(context: typer.Context) -> None:
    """Run a gateway alone; its flags: kagari gateway --help."""
    from gateway.cli.hand_over import hand_over

    hand_over("gateway", context.args)


@app.command(context_settings=PASS_ON)
def node(context: typer.Context) -> None:
    """Run a node agent alone; its flags: kagari node --help."""
    from gateway.cli.hand_over import hand_over

    hand_over("node_agent", context.args)


@app.command(context_settings=PASS_ON)
def engine(context: typer.Context) -> None:
    """`engine generate MODEL "text"` says hello without a network; the rest is the engine's own."""
    from gateway.cli.generate import generate_app
    from gateway.cli.hand_over import hand_over

    if context.args[:1] == ["generate"]:
        generate_app(context.args[1:], prog_name="kagari engine generate")
    else:
        hand_over("engine", context.args)


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """Models of the catalogue and whether they are here."""
    from gateway.cli.hand_over import hand_over

    hand_over("node_agent", ["models", "list", *(["--json"] if as_json else [])])


@models_app.command("pull")
def models_pull(
    name: Annotated[str, typer.Argument(help="A catalogue name, or ORG/NAME of a hub.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be fetched and what fits.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model and check its SHA-256."""
    from gateway.cli.hand_over import hand_over
    from gateway.cli.models import pull_model

    flags = [*(["--dry-run"] if dry_run else []), *(["--json"] if as_json else [])]
    if flags:
        hand_over("node_agent", ["models", "pull", name, *flags])
    pull_model(name)


@models_app.command("show")
def models_show(name: str, as_json: AsJson = False) -> None:
    """What a model is: file, context, digests, labels."""
    from gateway.cli.hand_over import hand_over

    hand_over("node_agent", ["models", "show", name, *(["--json"] if as_json else [])])


@keys_app.command("create")
def keys_create(name: str, home: Home = None, as_json: AsJson = False) -> None:
    """Create a key; its secret is shown this once."""
    from gateway.cli.keys import create_key

    create_key(name, home=home, as_json=as_json)


@keys_app.command("list")
def keys_list(home: Home = None, as_json: AsJson = False) -> None:
    """Keys, without their secrets."""
    from gateway.cli.keys import list_keys

    list_keys(home=home, as_json=as_json)


@keys_app.command("revoke")
def keys_revoke(name: str, home: Home = None, as_json: AsJson = False) -> None:
    """End a key, by its name or id; a running gateway notices."""
    from gateway.cli.keys import revoke_key

    revoke_key(name, home=home, as_json=as_json)


@app.command()
def usage(
    by: Annotated[Literal["day", "key", "model"], typer.Option(help="One row for each.")] = "day",
    requests: Annotated[bool, typer.Option(help="One row for each request.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Requests, tokens, cached share, cost and what caching saved."""
    from gateway.cli.usage import show_requests, show_usage

    if requests:
        show_requests(home=home, as_json=as_json)
    else:
        show_usage(by, home=home, as_json=as_json)


@ledger_app.command("verify")
def ledger_verify(home: Home = None, as_json: AsJson = False) -> None:
    """Recompute every charge and sum from the rows; exit 1 if one differs."""
    from gateway.cli.usage import verify_ledger

    verify_ledger(home=home, as_json=as_json)


@app.command()
def doctor(
    port: Annotated[int, typer.Option(help="Port that serve would use.")] = 8000,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine; each finding comes with its remedy. Exit 1 if one must be mended."""
    from gateway.cli.doctor import run_doctor

    run_doctor(port=port, home=home, as_json=as_json)


@config_app.command("check")
def config_check(
    file: Annotated[Path | None, typer.Argument(help="TOML file of the gateway.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read the configuration as the gateway would; exit 2 with the reason if it would not."""
    from gateway.cli.configuration import check_config

    check_config(file, as_json=as_json)


@config_app.command("show")
def config_show(
    file: Annotated[Path | None, typer.Argument(help="TOML file of the gateway.")] = None,
    origin: Annotated[bool, typer.Option(help="Say where each value came from.")] = False,
    as_json: AsJson = False,
) -> None:
    """Every setting in force; secrets are not shown."""
    from gateway.cli.configuration import show_config

    show_config(file, origin=origin, as_json=as_json)


@app.command()
def demo(
    check: Annotated[bool, typer.Option(help="Exit 1 if a claim does not hold.")] = False,
    turns: Annotated[
        int, typer.Option(min=3, max=NUM_TURNS, help="Of each agent in act 1.")
    ] = NUM_TURNS,
    landing_tokens: Annotated[
        int, typer.Option(min=512, max=7000, help="Of the prompt that lands in act 3.")
    ] = 6000,
    as_json: AsJson = False,
) -> None:
    """A live show on the embedded model: affinity, its discount, split nodes, slower tiers."""
    from gateway.demo.show import run_demo

    run_demo(check=check, as_json=as_json, turns=turns, landing_tokens=landing_tokens)


if __name__ == "__main__":
    main()
