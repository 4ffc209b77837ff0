"""What `serve` starts, decided without starting it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import serve as serve_module
from gateway.cli.main import app
from gateway.cli.problem import Problem
from gateway.cli.serve import essentials
from gateway.cli.serve_plan import (
    DEFAULT_MODEL,
    Launch,
    ServeOptions,
    free_ports,
    link_host,
    plan_serve,
    require_free_port,
)
from node_agent.config import parse_config


def options(**changes: object) -> ServeOptions:
    home = Path("/home/somebody/kagari")
    given: dict[str, object] = {
        "home": home,
        "key_file": home / "api.key",
        "join_token_file": home / "join.token",
        **changes,
    }
    return ServeOptions(**given)  # type: ignore[arg-type]


def flag(launch: Launch, name: str) -> str:
    return launch.arguments[launch.arguments.index(name) + 1]


def test_the_default_is_one_mixed_node_with_the_default_model() -> None:
    plan = plan_serve(options(), port=8000, link_port=9001, admin_port=9002)
    assert [node.name for node in plan.nodes] == ["n1"]
    assert flag(plan.nodes[0], "--model") == DEFAULT_MODEL
    assert flag(plan.nodes[0], "--role") == "mixed"
    assert flag(plan.nodes[0], "--gateway") == "ws://127.0.0.1:9001"
    assert flag(plan.gateway, "--link-port") == "9001"
    assert plan.api_url == "http://127.0.0.1:8000"
    assert plan.admin_url == "http://127.0.0.1:9002"


def test_nodes_are_named_and_share_the_cores() -> None:
    plan = plan_serve(options(num_nodes=3), port=1, link_port=2, admin_port=3)
    assert [node.name for node in plan.nodes] == ["n1", "n2", "n3"]
    assert [flag(node, "--node-id") for node in plan.nodes] == ["n1", "n2", "n3"]
    assert all(int(flag(node, "--threads")) >= 1 for node in plan.nodes)
    fixed = plan_serve(options(num_nodes=3, threads=7), port=1, link_port=2, admin_port=3)
    assert [flag(node, "--threads") for node in fixed.nodes] == ["7", "7", "7"]


def test_prefill_and_decode_nodes_have_their_roles_and_share_the_cores() -> None:
    given = options(num_prefill=2, num_decode=1, split="always")
    plan = plan_serve(given, port=1, link_port=2, admin_port=3)
    assert [(node.name, flag(node, "--role")) for node in plan.nodes] == [
        ("n1", "prefill"),
        ("n2", "prefill"),
        ("n3", "decode"),
    ]
    mixed = plan_serve(options(num_nodes=3), port=1, link_port=2, admin_port=3)
    assert {flag(node, "--threads") for node in plan.nodes} == {
        flag(node, "--threads") for node in mixed.nodes
    }
    assert flag(plan.gateway, "--split") == "always"
    assert "--split" not in mixed.gateway.arguments


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_nodes": 0}, "--nodes"),
        ({"num_nodes": 1, "num_prefill": 1, "num_decode": 1}, "--nodes"),
        ({"num_prefill": 1}, "--decode"),
        ({"num_decode": 1}, "--prefill"),
        ({"num_prefill": 0, "num_decode": 1}, "--prefill"),
        ({"num_prefill": 1, "num_decode": -1}, "--decode"),
        ({"engine_flags": ("--kv-dtype", "decoder=fp8")}, "--kv-dtype"),
        ({"engine_flags": ("--dtype", "prefill=")}, "--dtype"),
        ({"engine_flags": ("--compute", "prefill=quick")}, "--compute"),
    ],
)
def test_what_no_fleet_can_be_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(Problem) as caught:
        plan_serve(options(**changes), port=1, link_port=2, admin_port=3)
    assert caught.value.field == field


def test_a_precision_may_be_given_for_each_role() -> None:
    flags = ("--kv-dtype", "prefill=bf16,decode=int8", "--dtype", "decode=fp32", "--device", "cpu")
    given = options(num_prefill=1, num_decode=1, engine_flags=flags)
    prefill, decode = plan_serve(given, port=1, link_port=2, admin_port=3).nodes
    assert (flag(prefill, "--kv-dtype"), flag(decode, "--kv-dtype")) == ("bf16", "int8")
    assert "--dtype" not in prefill.arguments
    assert flag(decode, "--dtype") == "fp32"
    assert flag(prefill, "--device") == flag(decode, "--device") == "cpu"


@pytest.mark.parametrize(
    ("flags", "announced"),
    [
        (("--compute", "prefill=fast,decode=exact", "--kv-dtype", "int8"), ["fast", "fast"]),
        (("--compute", "prefill=fast"), ["fast", "fast"]),
        (("--kv-dtype", "decode=int8"), ["fast", "fast"]),
        (("--dtype", "decode=fp32"), ["fast", "fast"]),
        (("--compute", "prefill=fast,decode=fast"), [None, None]),
        (("--compute", "fast", "--kv-dtype", "prefill=bf16"), [None, None]),
    ],
)
def test_where_roles_make_other_pages_no_node_promises_exact_answers(
    flags: tuple[str, ...], announced: list[str | None]
) -> None:
    given = options(num_prefill=1, num_decode=1, engine_flags=flags)
    nodes = plan_serve(given, port=1, link_port=2, admin_port=3).nodes
    told = [flag(node, "--announce") if "--announce" in node.arguments else None for node in nodes]
    assert told == announced


def test_a_way_to_split_that_nobody_knows_starts_nothing(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["serve", "--home", str(tmp_path), "--split", "sometimes"])
    assert isinstance(told.exception, Problem)
    assert told.exception.field == "--split"


def test_no_secret_is_on_a_command_line() -> None:
    plan = plan_serve(options(), port=1, link_port=2, admin_port=3)
    for launch in (plan.gateway, *plan.nodes):
        assert "--api-key" not in launch.arguments
        assert "--join-token" not in launch.arguments


def test_engine_flags_and_script_reach_every_node() -> None:
    given = options(
        num_nodes=2,
        script=Path("replies.json"),
        engine_flags=("--kv-device-tokens", "4096"),
        models=("a", "b"),
    )
    for node in plan_serve(given, port=1, link_port=2, admin_port=3).nodes:
        assert flag(node, "--script") == "replies.json"
        assert flag(node, "--kv-device-tokens") == "4096"
        assert [node.arguments[i + 1] for i, a in enumerate(node.arguments) if a == "--model"] == [
            "a",
            "b",
        ]


@pytest.mark.parametrize(
    ("host", "dialled"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.1.2.3", "10.1.2.3")]
)
def test_nodes_never_dial_a_wildcard(host: str, dialled: str) -> None:
    assert link_host(host) == dialled


def test_nodes_of_one_serve_share_their_memory_for_pages_and_a_lone_one_has_its_own() -> None:
    lone = plan_serve(options(), port=1, link_port=2, admin_port=3)
    assert "--kv-host-share" not in lone.nodes[0].arguments
    several = plan_serve(options(num_nodes=2), port=1, link_port=2, admin_port=3)
    assert {flag(node, "--kv-host-share") for node in several.nodes} == {str(options().home)}


def test_a_busy_port_is_refused_with_its_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Problem) as caught:
            require_free_port("127.0.0.1", port, "--port")
    assert "in use" in caught.value.found
    assert str(port) in caught.value.remedy
    require_free_port("127.0.0.1", port, "--port")


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports("127.0.0.1", 20))) == 20


@pytest.mark.parametrize(
    ("can_chat", "path", "field"),
    [(True, "/v1/chat/completions", "messages"), (False, "/v1/completions", "prompt")],
)
def test_the_printed_curl_asks_a_base_model_for_no_chat(
    can_chat: bool, path: str, field: str
) -> None:
    plan = plan_serve(options(), port=8000, link_port=9001, admin_port=9002)
    text = essentials(plan, secret="key", model="m", can_chat=can_chat, home=Path("/h"))
    assert f"curl {plan.api_url}{path} " in text
    body = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert (body["model"], field in body) == ("m", True)


def test_the_flags_of_tiers_reach_a_node_that_understands_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ServeOptions] = []
    monkeypatch.setattr(serve_module, "serve", lambda given, **_: asked.append(given))
    flags = (
        *("--kv-host-mb", "64", "--kv-disk-mb", "0", "--kv-disk-dir", str(tmp_path / "kv")),
        *("--cluster-store", "mooncake://master:50051", "--kv-dtype", "fp8"),
    )
    told = CliRunner().invoke(app, ["serve", "--home", str(tmp_path), *flags])
    assert told.exit_code == 0, told.output
    plan = plan_serve(asked[0], port=1, link_port=2, admin_port=3)
    (tmp_path / "join.token").write_text("token")
    config = parse_config(plan.nodes[0].arguments)
    assert (config.kv_host_mb, config.kv_disk_mb) == (64, 0)
    assert config.kv_disk_dir == tmp_path / "kv"
    assert config.cluster_store == "mooncake://master:50051"
    assert config.engine_flags == ("--kv-dtype", "fp8")


def test_upstreams_alone_need_no_node_and_are_the_gateways() -> None:
    said = {"upstreams": ("http://a:1", "http://b:1"), "upstream_flags": ("--dialect", "vllm")}
    alone = plan_serve(options(**said), port=1, link_port=2, admin_port=3)
    assert alone.nodes == ()
    named = alone.gateway.arguments
    assert [named[at + 1] for at, word in enumerate(named) if word == "--upstream"] == [
        "http://a:1",
        "http://b:1",
    ]
    assert flag(alone.gateway, "--dialect") == "vllm"
    beside = plan_serve(options(**said, models=("m",)), port=1, link_port=2, admin_port=3)
    assert [flag(node, "--model") for node in beside.nodes] == ["m"]
