"""`kagari admin …` against a gateway that runs in this process, and against none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from gateway.home import ADDRESSES_NAME
from tests.gateway.api.conftest import RunningGateway, start_gateway

Kagari = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kagari:
    """As `kagari`, in this process: one of its own costs each command half a second."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["kagari", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code, told.out, told.err)

    return run


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with start_gateway(tmp_path_factory.mktemp("home")) as gateway:
        yield gateway


def turn(gateway: RunningGateway, text: str, session: str) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": json.dumps({"say": text})}]}
    with gateway.client() as client:
        answer = client.post(
            "/v1/chat/completions", json=body, headers={"x-session-affinity": session}
        )
    gateway.wait_idle()
    return str(answer.headers["x-request-id"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--home", "HOME", "keys", "list", "--json"),
        ("keys", "--home", "HOME", "list", "--json"),
        ("keys", "list", "--json", "--home=HOME"),
        ("keys", "list", "--home", "HOME", "--json"),
    ],
)
def test_the_homes_flag_may_stand_where_every_other_command_has_it(
    here: Kagari, shared: RunningGateway, arguments: tuple[str, ...]
) -> None:
    home = str(shared.services.home.folder)
    told = here("admin", *[word.replace("HOME", home) for word in arguments])
    assert told.returncode == 0, told.stderr
    assert isinstance(json.loads(told.stdout), list)


def test_a_flag_behind_two_dashes_is_a_value(here: Kagari, shared: RunningGateway) -> None:
    home = str(shared.services.home.folder)
    told = here("admin", "--home", home, "keys", "show", "--", "--token")
    assert told.returncode == 1
    assert '"--token"' in told.stderr


def test_every_command_answers_in_json_and_as_a_table(
    here: Kagari, shared: RunningGateway, tmp_path: Path
) -> None:
    home = str(shared.services.home.folder)
    request_id = turn(shared, "hello", "conversation-1")

    def ask(*arguments: str) -> Any:
        told = here("admin", "--home", home, *arguments, "--json")
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)

    def table(*arguments: str) -> str:
        told = here("admin", "--home", home, *arguments)
        assert told.returncode == 0, told.stderr
        return told.stdout

    made = ask("keys", "create", "[red]/a", "--tenant", "acme")
    assert made["secret"].startswith("kg-")
    assert [key["name"] for key in ask("keys", "list")] == ["[red]/a"]
    assert "[red]/a" in table("keys", "list")  # a name is never read as a style
    assert ask("keys", "show", "[red]/a")["tenant"] == "acme"
    assert ask("keys", "rename", made["key_id"], "b")["name"] == "b"
    assert "not shown again" in table("keys", "create", "c")
    hasty = ask("keys", "create", "d", "--ttft-deadline-ms", "1900")
    assert hasty["ttft_deadline_ms"] == 1900
    assert "1,900" in table("keys", "show", "d")
    assert ask("keys", "deadline", "d", "700")["ttft_deadline_ms"] == 700
    assert ask("keys", "deadline", "d")["ttft_deadline_ms"] is None
    assert ask("keys", "revoke", "b")["revoked_at"] is not None
    assert made["key_id"] in table("keys", "revoke", made["key_id"])

    assert ask("usage", "--by", "model", "--by", "key")["total"]["completion_tokens"] == 5
    assert "total" in table("usage")
    (row,) = ask("requests", "--status", "ok", "--model", "tiny")
    assert row["request_id"] == request_id
    assert request_id in table("requests", "--limit", "3")
    assert ask("request", request_id)["arithmetic"]["charge_nano_usd"] == row["charge_nano_usd"]
    assert "rounded half up" in table("request", request_id)

    assert [node["node_id"] for node in ask("nodes")] == ["n1"]
    assert "ready" in table("node", "n1")
    assert ask("drain", "n1") == {"node_id": "n1", "draining": True}
    assert "draining" in table("nodes")
    assert "chosen again" in table("undrain", "n1")
    assert ask("role", "n1", "mixed") == {"node_id": "n1", "role": "mixed", "next_role": None}
    assert table("role", "n1", "mixed") == "n1 is mixed\n"

    prompt = tmp_path / "request.json"
    prompt.write_text(json.dumps({"prompt": "x" * 99, "temperature": 0, "model": "ignored"}))
    pinned = ask("prefixes", "create", "p", "--model", "tiny", "--file", str(prompt))
    assert (pinned["state"], pinned["pages"]) == ("pinned", 6)
    assert ask("prefixes", "list") == [pinned]
    assert "n1 engine 0: pinned, 6 pages" in table("prefixes", "show", pinned["prefix_id"])
    by_name = here("admin", "--home", home, "prefixes", "delete", "p")
    assert by_name.returncode == 1
    assert f'did you mean "{pinned["prefix_id"]}"?' in by_name.stderr
    assert "not pinned any more" in table("prefixes", "delete", pinned["prefix_id"])
    at_once = ("create", "q", "--model", "tiny", "--file", str(prompt), "--wait-s", "0")
    assert here("admin", "--home", home, "prefixes", *at_once).returncode == 1, "not pinned yet"
    listed = ask("prefixes", "list")
    assert "not pinned any more" in table("prefixes", "delete", listed[0]["prefix_id"])
    assert table("prefixes", "list").count("\n") == 1
    assert ask("purge", "default")["complete"]
    assert "nothing is left" in table("purge", "default")

    assert ask("prices")["version"] in table("prices")
    told = ask("explain", "--request", row["request_id"])
    assert [one["node_id"] for one in told["decisions"]] == ["n1"]
    prompt.write_text(json.dumps({"prompt": "x" * 99, "model": "tiny"}))
    assert "n1 (home)" in table("explain", str(prompt), "--session", "conversation-1")
    found = ask("sessions", "conversation-1", "--model", "tiny")
    assert found["home"] == "n1"
    assert found["session"] in table("sessions", "--digest", row["session"])


@pytest.mark.parametrize(
    ("arguments", "field", "exit_code"),
    [
        (("request", "nothing"), "request", 1),
        (("keys", "revoke", "nobody"), "key", 1),
        (("drain", "n7"), "node", 1),
        (("role", "n7", "mixed"), "node", 1),
        (("role", "n1", "verify"), "role", 2),
        (("sessions", "x", "--model", "tiny"), "session", 1),
        (("sessions",), "VALUE", 2),
        (("explain",), "FILE", 2),
        (("explain", "/nowhere"), "FILE", 2),
        (("explain", "--request", "nothing"), "request_id", 1),
        (("purge", "nobody"), "tenant", 1),
        (("prefixes", "delete", "nothing"), "prefix", 1),
        (("prefixes", "create", "p", "--model", "tiny", "--file", "/nowhere"), "--file", 2),
        (("usage", "--from", "yesterday"), "from", 2),
        (("keys", "create", "x" * 65), "name", 2),
    ],
)
def test_a_refusal_has_four_parts_and_a_status(here, shared, arguments, field, exit_code) -> None:
    told = here("admin", "--home", str(shared.services.home.folder), *arguments)
    assert told.returncode == exit_code
    refused(told, field)


def refused(told: subprocess.CompletedProcess[str], field: str) -> None:
    assert told.stdout == ""
    first, *parts = told.stderr.splitlines()
    assert first == f"error: {field}"
    assert [part.split(":")[0].strip() for part in parts] == ["found", "allowed", "remedy"]


def test_a_gateway_is_found_by_flags_too(here: Kagari, shared, tmp_path: Path) -> None:
    url, token = shared.addresses.admin_url, shared.services.home.admin_token
    file = tmp_path / "token"
    file.write_text(token + "\n")
    for flags in (("--token", token), ("--token-file", str(file))):
        assert here("admin", "--url", url, *flags, "prices").returncode == 0
    wrong = here("admin", "--url", url, "--token", "0" * 64, "prices")
    assert wrong.returncode == 2
    refused(wrong, "--token")
    for flags, field in (
        (("--url", "https://x", "--token", token), "--url"),
        (("--url", url, "--token", token, "--token-file", str(file)), "--token"),
        (("--url", url, "--token-file", str(tmp_path / "absent")), "--token-file"),
    ):
        told = here("admin", *flags, "prices")
        assert told.returncode == 2
        refused(told, field)
    nobody = here("admin", "--url", "http://127.0.0.1:9", "--token", token, "prices")
    assert nobody.returncode == 1
    refused(nobody, "--url")


def test_without_a_running_gateway_the_remedy_is_said(kagari: Kagari, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with start_gateway(home):
        told = json.loads((home / ADDRESSES_NAME).read_text())
        assert (home / ADDRESSES_NAME).stat().st_mode & 0o777 == 0o600
        assert json.loads(kagari("admin", "nodes", "--json").stdout)[0]["node_id"] == "n1"
    assert not (home / ADDRESSES_NAME).exists()
    # As a killed gateway leaves it: whoever listens there now must not get the token.
    (home / ADDRESSES_NAME).write_text(json.dumps(told))
    answer = kagari("admin", "nodes")
    assert answer.returncode == 1
    refused(answer, "--home")
    assert "kagari serve" in answer.stderr


def test_a_purge_that_a_node_has_not_answered_is_no_success(
    here: Kagari, shared: RunningGateway
) -> None:
    home = str(shared.services.home.folder)
    shared.node.obeys = False
    try:
        told = here("admin", "--home", home, "purge", "default", "--wait-s", "0.1")
    finally:
        shared.node.obeys = True
    assert told.returncode == 1
    assert "pending" in told.stdout
    assert "goes on" in told.stdout
