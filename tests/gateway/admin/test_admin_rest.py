"""The operator's routes over the wire: keys, usage, requests, nodes, prices, sessions."""

from __future__ import annotations

import json
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from gateway.admin.prices import usd_per_million
from gateway.ledger.files import KEYS_NAME
from policies.affinity import scoped_digest
from tests.gateway.api.conftest import KEY, OTHER_KEY

SECRET_TEXT = "a-secret-of-the-client"


def refused(answer: httpx.Response, status: int, code: str, field: str) -> dict[str, Any]:
    """An error in four parts."""
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, field), error
    assert error["found"]
    assert error["allowed"]
    assert error["remedy"]
    return error


# --- keys ---------------------------------------------------------------------------------------


def test_a_key_lives_from_its_creation_to_its_revocation(gateway, admin) -> None:
    made = admin.post("/admin/v1/keys", json={"name": "laptop", "tenant": "acme"})
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    created = made.json()
    assert created["secret"].startswith("kg-")
    with gateway.client(key=created["secret"]) as client:
        assert client.get("/v1/models").status_code == 200  # at once
        refused(admin.post("/admin/v1/keys", json={"name": "laptop"}), 409, "key_exists", "name")

        shown = admin.get("/admin/v1/keys/laptop").json()
        assert shown == {k: v for k, v in created.items() if k != "secret"}
        assert (shown["tenant"], shown["revoked_at"]) == ("acme", None)

        path = f"/admin/v1/keys/{shown['key_id']}"
        assert admin.patch(path, json={"name": "desktop"}).json()["name"] == "desktop"
        refused(admin.get("/admin/v1/keys/laptop"), 404, "key_not_found", "key")
        assert client.get("/v1/models").status_code == 200

        ended = admin.delete("/admin/v1/keys/desktop").json()
        assert ended["revoked_at"] >= ended["created_at"]
        assert client.get("/v1/models").status_code == 401  # at once
        assert admin.delete(path).json() == ended  # again: nothing changes
        refused(admin.patch(path, json={"name": "x"}), 404, "key_not_found", "key")
        assert admin.get(path).json() == ended
    assert created["secret"] not in gateway.log.getvalue()


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({}, "invalid_request", "name"),
        ({"name": ""}, "invalid_request", "name"),
        ({"name": "x" * 65}, "invalid_request", "name"),
        ({"name": "a\nb"}, "invalid_request", "name"),
        ({"name": 7}, "invalid_request", "name"),
        ({"name": "x", "tenant": ""}, "invalid_request", "tenant"),
        ({"name": "x", "tenant": "\u0000"}, "invalid_request", "tenant"),
        ({"name": "x", "tennant": "y"}, "invalid_request", '"tennant"'),
        (["name"], "invalid_request", "body"),
        (b'{"name": "\\ud800"}', "invalid_json", "body"),
        (b"", "missing_body", "body"),
        (b"\xff", "invalid_json", "body"),
    ],
)
def test_an_impossible_key_is_refused_by_its_field(admin, body, code, field) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    refused(admin.post("/admin/v1/keys", content=content), 400, code, field)


def test_a_keys_deadline_is_set_changed_and_taken_away(gateway, admin) -> None:
    hasty = {"name": "hasty", "ttft_deadline_ms": 1500}
    made = admin.post("/admin/v1/keys", json=hasty).json()
    assert made["ttft_deadline_ms"] == 1500
    find = gateway.services.keys.find
    assert gateway.call(lambda: find(made["secret"])).ttft_deadline_ms == 1500
    path = f"/admin/v1/keys/{made['key_id']}"
    changed = admin.patch(path, json={"ttft_deadline_ms": 800}).json()
    assert (changed["name"], changed["ttft_deadline_ms"]) == ("hasty", 800)
    assert gateway.call(lambda: find(made["secret"])).ttft_deadline_ms == 800
    assert admin.patch(path, json={"name": "hastier"}).json()["ttft_deadline_ms"] == 800
    both = admin.patch(path, json={"name": "calm", "ttft_deadline_ms": None}).json()
    assert (both["name"], both["ttft_deadline_ms"]) == ("calm", None)
    assert gateway.call(lambda: find(made["secret"])).ttft_deadline_ms is None
    for wrong in (0, -1, 3_600_001, "5", 1.5):
        refused(
            admin.patch(path, json={"ttft_deadline_ms": wrong}),
            400,
            "invalid_request",
            "ttft_deadline_ms",
        )
    refused(admin.patch(path, json={}), 400, "invalid_request", "body")
    admin.delete(path)
    refused(admin.patch(path, json={"ttft_deadline_ms": 5}), 404, "key_not_found", "key")


def test_keys_are_paged_oldest_first_and_tell_no_secret(gateway, admin) -> None:
    made = [admin.post("/admin/v1/keys", json={"name": f"page-{i}"}).json() for i in range(5)]
    admin.delete("/admin/v1/keys/page-2")
    told, after = "", None
    names: list[str] = []
    while True:
        query = {"limit": "2", **({"after": after} if after else {})}
        page = admin.get("/admin/v1/keys", params=query)
        told += page.text
        names += [key["name"] for key in page.json()["keys"]]
        after = page.json()["next"]
        if after is None:
            break
        late = f"late-{len(names)}"
        admin.post("/admin/v1/keys", json={"name": late})
    ours = [name for name in names if name.startswith("page-")]
    assert ours == [f"page-{i}" for i in range(5)]
    assert len(set(names)) == len(names)
    assert "digest" not in told
    for key in made:
        assert key["secret"] not in told


# --- usage and requests -------------------------------------------------------------------------


def test_usage_groups_add_up_to_the_total(gateway, admin, chat) -> None:
    for key in (KEY, OTHER_KEY, KEY):
        chat({"say": "12345"}, key=key)
    total = admin.get("/admin/v1/usage").json()["total"]
    assert total["requests"] >= 3
    assert total["completion_tokens"] >= 15
    today = datetime.now(UTC).date().isoformat()
    for groups in ("day", "tenant", "key", "model", "model,key", "day,tenant,key,model"):
        told = admin.get("/admin/v1/usage", params={"group_by": groups, "from": today}).json()
        assert told["group_by"] == groups.split(",")
        assert not told["is_cut"]
        for figure in ("requests", "prompt_tokens", "charge_nano_usd", "saved_nano_usd"):
            assert sum(line[figure] for line in told["lines"]) == total[figure]
    keys = admin.get("/admin/v1/usage", params={"group_by": "key"}).json()["lines"]
    assert len(keys) == 2
    one = admin.get("/admin/v1/usage", params={"key": keys[0]["key_id"]}).json()["total"]
    assert one["charge_nano_usd"] == keys[0]["charge_nano_usd"]
    cut = admin.get("/admin/v1/usage", params={"group_by": "key", "limit": 1}).json()
    assert (len(cut["lines"]), cut["is_cut"], cut["total"]) == (1, True, total)
    none = admin.get("/admin/v1/usage", params={"to": "1999-12-31"}).json()
    assert (none["lines"], none["total"]["requests"]) == ([], 0)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("group_by=hour", "group_by[0]"),
        ("group_by=day,day", "group_by"),
        ("from=yesterday", "from"),
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("form=2026-01-01", '"form"'),
        ("limit=1&limit=2", '"limit"'),
        ("&".join(f"a{i}=1" for i in range(100)), "query"),
    ],
)
def test_a_wrong_query_of_usage_is_refused_by_its_field(admin, query, field) -> None:
    error = refused(admin.get(f"/admin/v1/usage?{query}"), 400, "invalid_request", field)
    if query == "group_by=hour":
        assert (error["found"], error["allowed"]) == ("'hour'", "day, tenant, key, model")
    if query.startswith("form"):
        assert error["remedy"] == "did you mean from?"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("after=AAAA", "after"),
        ("after=%FF", "after"),
        ("after=" + "A" * 600, "after"),
        ("after=_w", "after"),
        ("after=z___________", "after"),  # more than a sequence can be
        ("status=fine", "status"),
        ("from=2026-01-01T00:00:00", "from"),
        ("to=now", "to"),
        ("limit=1001", "limit"),
    ],
)
def test_a_wrong_query_of_requests_is_refused_by_its_field(admin, query, field) -> None:
    refused(admin.get(f"/admin/v1/requests?{query}"), 400, "invalid_request", field)


def test_requests_are_paged_newest_first_and_filtered(gateway, admin, chat) -> None:
    made = [chat({"say": str(i)}, key=OTHER_KEY if i == 2 else KEY) for i in range(5)]
    seen: list[dict[str, Any]] = []
    after: str | None = None
    while len(seen) < 5:
        query = {"limit": "2", **({"after": after} if after else {})}
        page = admin.get("/admin/v1/requests", params=query).json()
        seen += page["requests"]
        after = page["next"]
        chat({"say": "meanwhile"})
    assert [row["request_id"] for row in seen[:5]] == made[::-1]
    row = seen[2]

    def ids(**query: str) -> list[str]:
        answer = admin.get("/admin/v1/requests", params={"limit": "1000", **query}).json()
        return [found["request_id"] for found in answer["requests"]]

    assert ids(key=row["key_id"])[0] == made[2]
    assert made[2] not in ids(key=seen[0]["key_id"])
    assert ids(tenant="nobody") == ids(model="none") == ids(status="failed") == []
    assert set(made) < set(ids(status="ok", tenant="default", model="tiny"))
    assert ids(request_id=made[3]) == [made[3]]
    assert ids(request_id=made[3], status="failed") == []
    moment = datetime.fromtimestamp(row["started_at"] - 0.001, UTC)
    until = moment + timedelta(seconds=9)
    around = ids(**{"from": moment.isoformat(), "to": until.isoformat()})
    assert made[2] in around
    assert made[1] not in around


def test_a_request_shows_its_tries_and_how_its_charge_comes_about(gateway, admin, chat) -> None:
    chat({"say": "warm", "x": "y" * 100})
    request_id = chat({"say": "warm", "x": "y" * 100}, x_session_affinity="conversation-1")
    row = admin.get(f"/admin/v1/requests/{request_id}").json()
    assert row["status"] == "ok"
    assert row["cached_tokens"] >= 64
    assert row["attempts"] == []
    sums = row["arithmetic"]
    assert [term["what"] for term in sums["terms"]] == ["input", "cached", "output"]
    for term, what in zip(sums["terms"], ("input", "cached", "output"), strict=True):
        assert term["rate_pico_usd"] == row["rates"][what]
        assert term["pico_usd"] == term["tokens"] * term["rate_pico_usd"]
    assert sums["pico_usd"] == sum(term["pico_usd"] for term in sums["terms"])
    assert (sums["pico_usd"] + 500) // 1000 == sums["charge_nano_usd"] == row["charge_nano_usd"]
    assert sums["full_nano_usd"] - sums["saved_nano_usd"] == row["charge_nano_usd"]
    assert sums["saved_nano_usd"] == row["saved_nano_usd"] > 0
    listed = admin.get("/admin/v1/requests", params={"request_id": request_id}).json()["requests"]
    assert listed == [{name: row[name] for name in listed[0]}]

    failed = chat({"fail": "engine_error"})
    row = admin.get(f"/admin/v1/requests/{failed}").json()
    assert (row["status"], row["charge_nano_usd"], row["arithmetic"]["pico_usd"]) == (
        "failed",
        0,
        0,
    )
    assert row["attempts"][0]["outcome"] == "failed"
    refused(admin.get("/admin/v1/requests/nothing"), 404, "request_not_found", "request")


def test_no_answer_holds_what_a_client_said_or_was_told(gateway, admin, chat) -> None:
    """Prompt, answer and session value of a turn are in no answer of the operator's."""
    request_id = chat({"say": SECRET_TEXT}, x_session_affinity=SECRET_TEXT + "-session")
    session = admin.get(f"/admin/v1/requests/{request_id}").json()["session"]
    document = admin.get("/admin/v1/openapi.json").json()
    for path, operations in document["paths"].items():
        if "get" not in operations or "/admin/" not in path:
            continue
        for name, value in {
            "{request}": request_id, "{digest}": session, "{node}": "n1", "{key}": "x",
        }.items():  # fmt: skip
            path = path.replace(name, value)
        assert SECRET_TEXT not in admin.get(path).text, path
    assert SECRET_TEXT not in gateway.log.getvalue()


# --- files that do not answer --------------------------------------------------------------------


def test_a_ledger_that_does_not_answer_in_time_is_said(gateway, admin, monkeypatch) -> None:
    monkeypatch.setattr(gateway.services.ledger_reader, "_deadline_s", 0.0)
    error = refused(admin.get("/admin/v1/usage"), 503, "ledger_unreadable", "from")
    assert "fewer days" in error["remedy"]
    for path in ("/admin/v1/requests", "/admin/v1/requests/x"):
        answer = admin.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ledger_unreadable")


def test_a_book_of_keys_that_another_holds_is_said_and_holds_up_nobody(gateway, admin) -> None:
    path = gateway.services.home.folder / KEYS_NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(admin.post, "/admin/v1/keys", json={"name": "held"})
            with gateway.client() as client:
                answered = 0
                while not waiting.done():
                    assert client.get("/v1/models").status_code == 200
                    answered += not waiting.done()
                    time.sleep(0.05)
                assert answered >= 5  # within 2 s; a loop that the lock held would answer one
        answer = waiting.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ledger_unreadable")
    assert str(path) not in answer.text
    assert admin.post("/admin/v1/keys", json={"name": "held"}).status_code == 201


# --- nodes and prices ---------------------------------------------------------------------------


def test_a_node_is_shown_drained_and_taken_back(gateway, admin) -> None:
    node = admin.get("/admin/v1/nodes/n1").json()
    assert [node] == [
        {**one, "report_age_s": node["report_age_s"], "link_age_s": node["link_age_s"]}
        for one in admin.get("/admin/v1/nodes").json()["nodes"]
    ]
    assert (node["state"], node["in_flight"]) == ("ready", 0)
    assert 0 <= node["report_age_s"] < 5
    (engine,) = node["engines"]
    assert engine["info"]["model"] == "tiny"
    assert engine["report"]["state"] == "ready"
    assert engine["resident_pages"] >= 0
    for _ in range(2):
        told = admin.post("/admin/v1/nodes/n1/drain").json()
        assert told == {"node_id": "n1", "draining": True}
    assert admin.get("/admin/v1/nodes/n1").json()["state"] == "draining"
    for _ in range(2):
        assert admin.post("/admin/v1/nodes/n1/undrain").json()["draining"] is False
    assert admin.get("/admin/v1/nodes/n1").json()["state"] == "ready"
    for method, path in (("GET", ""), ("POST", "/drain"), ("POST", "/undrain")):
        lost = admin.request(method, f"/admin/v1/nodes/n7{path}")
        assert "n1" in refused(lost, 404, "node_not_found", "node")["remedy"]


def test_a_node_is_given_a_role(gateway, admin) -> None:
    for role, told in (("mixed", None), ("decode", "decode")):
        answer = admin.post("/admin/v1/nodes/n1/role", json={"role": role})
        assert answer.status_code == (202 if told else 200)
        assert answer.json() == {"node_id": "n1", "role": "mixed", "next_role": told}
    deadline = time.monotonic() + 10
    while (node := admin.get("/admin/v1/nodes/n1").json())["role"] != "decode":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert node["next_role"] is None
    admin.post("/admin/v1/nodes/n1/role", json={"role": "mixed"})
    while admin.get("/admin/v1/nodes/n1").json()["role"] != "mixed":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_role_that_cannot_be_is_refused(gateway, admin) -> None:
    path = "/admin/v1/nodes/n1/role"
    refused(admin.post(path, json={"role": "verify"}), 400, "invalid_request", "role")
    refused(admin.post(path, json={}), 400, "invalid_request", "role")
    refused(admin.post(path), 400, "missing_body", "body")
    lost = admin.post("/admin/v1/nodes/n7/role", json={"role": "mixed"})
    assert "n1" in refused(lost, 404, "node_not_found", "node")["remedy"]


def test_a_node_that_knows_no_roles_is_refused_one(start, tmp_path) -> None:
    with start(tmp_path, wire_version=3) as old, old.client() as client:
        client.headers["authorization"] = f"Bearer {old.services.home.admin_token}"
        url = f"{old.addresses.admin_url}/admin/v1/nodes/n1/role"
        told = refused(client.post(url, json={"role": "prefill"}), 400, "unsupported", "node")
        assert "wire version 3" in told["found"]


def test_prices_are_the_table_in_force(gateway, admin) -> None:
    told = admin.get("/admin/v1/prices").json()
    table = gateway.services.prices
    assert told["version"] == table.version
    assert "ships" in told["origin"]
    assert set(told["models"]) == set(table.price_by_model)
    line = told["models"]["smollm2-135m"]
    assert line["pico_usd_per_token"] == {"input": 20_000, "cached": 4_000, "output": 40_000}
    assert line["usd_per_million_tokens"] == {"input": "0.02", "cached": "0.004", "output": "0.04"}


def test_a_rate_is_shown_exactly() -> None:
    assert usd_per_million(0) == "0.00"
    assert usd_per_million(1) == "0.000001"
    assert usd_per_million(1_500_000) == "1.50"
    assert usd_per_million(12_345_678) == "12.345678"


# --- sessions -----------------------------------------------------------------------------------


def test_a_session_is_found_by_the_clients_value_and_by_its_rows_digest(
    gateway, admin, chat
) -> None:
    before = time.time()
    value = "conversation-2"
    request_id = chat({"say": "x", "pad": "z" * 200}, x_session_affinity=value)
    asked = {"value": value, "model": "tiny"}
    found = admin.post("/admin/v1/session-lookup", json=asked).json()
    row = admin.get(f"/admin/v1/requests/{request_id}").json()
    assert found["session"] == row["session"]
    assert found["home"] == row["node"] == "n1"
    assert before - 1 <= found["home_since"] <= found["last_seen"] <= time.time() + 1
    assert found["prompt_pages"] == row["admitted_prompt_tokens"] // 16
    assert found["resident"] == [{"node_id": "n1", "engine": 0, "tiers": ["device"]}]
    assert value not in json.dumps(found)
    by_alias = admin.post("/admin/v1/session-lookup", json={**asked, "model": "tiny-alias"}).json()
    by_digest = admin.get(f"/admin/v1/sessions/{row['session']}").json()
    for other in (by_alias, by_digest):
        assert other["last_seen"] == pytest.approx(found["last_seen"], abs=0.1)
        assert {**other, "last_seen": 0, "home_since": 0} == {
            **found, "last_seen": 0, "home_since": 0,
        }  # fmt: skip


def test_a_session_of_others_or_of_nobody_is_not_found(gateway, admin, chat) -> None:
    chat({"say": "x"}, x_session_affinity="conversation-3")
    asked = {"value": "conversation-3", "model": "tiny"}
    for wrong in ({"tenant": "acme"}, {"model": "other"}, {"value": "conversation-4"}):
        lost = admin.post("/admin/v1/session-lookup", json={**asked, **wrong})
        refused(lost, 404, "session_not_found", "session")
        assert "conversation" not in lost.text
    unsalted = scoped_digest(tenant="default", model="tiny", value="conversation-3").hex()
    refused(admin.get(f"/admin/v1/sessions/{unsalted}"), 404, "session_not_found", "session")
    for digest in ("abc", "zz" * 16, "00" * 15):
        refused(admin.get(f"/admin/v1/sessions/{digest}"), 400, "invalid_request", "digest")
    bad = admin.post("/admin/v1/session-lookup", json={"value": "a\nb", "model": "tiny"})
    refused(bad, 400, "invalid_request", "value")


# --- routing ------------------------------------------------------------------------------------


def test_a_dry_run_tells_the_cost_and_changes_nothing(gateway, admin, chat) -> None:
    said = {"say": "x", "pad": "z" * 200}
    request_id = chat(said, x_session_affinity="conversation-5")
    body = {"model": "tiny", "messages": [{"role": "user", "content": json.dumps(said)}]}
    query = {"session": "conversation-5"}
    told = admin.post("/admin/v1/routing/explain", params=query, json=body).json()
    assert told == admin.post("/admin/v1/routing/explain", params=query, json=body).json()
    assert (told["request_id"], told["policy_version"]) == (None, "routing-4")
    (decision,) = told["decisions"]
    row = admin.get(f"/admin/v1/requests/{request_id}").json()
    assert decision["prompt_tokens"] == row["admitted_prompt_tokens"]
    assert (decision["node_id"], decision["reason"], decision["affinity"]) == ("n1", "home", "hit")
    (candidate,) = decision["candidates"]
    assert candidate["hit_tokens"] == row["admitted_prompt_tokens"] // 16 * 16
    terms = ("backlog_s", "own_s", "fetch_s", "pressure_s")
    assert candidate["cost_s"] == pytest.approx(sum(candidate[term] for term in terms))
    others = admin.post("/admin/v1/routing/explain?tenant=acme", json=body).json()["decisions"][0]
    assert others["candidates"][0]["hit_tokens"] == 0, "pages of another tenant"
    assert others["affinity"] == "none"

    (past,) = admin.get(f"/admin/v1/routing/explain?request_id={request_id}").json()["decisions"]
    assert (past["node_id"], past["affinity"]) == (row["node"], "new")
    assert past["decided_at"] == pytest.approx(row["started_at"], abs=1.0)


def test_what_cannot_be_explained_is_refused(gateway, admin) -> None:
    path = "/admin/v1/routing/explain"
    refused(admin.get(f"{path}?request_id=x"), 404, "request_not_found", "request_id")
    refused(admin.get(path), 400, "invalid_request", "request_id")
    refused(admin.post(path, json={"model": "tiny"}), 400, "invalid_request", "prompt")
    odd = admin.post(f"{path}?session=a%0Ab", json={"model": "tiny", "prompt": [1]})
    refused(odd, 400, "invalid_request", "session")


def test_a_drained_node_is_told_as_rejected(gateway, admin) -> None:
    path, body = "/admin/v1/routing/explain", {"model": "tiny", "prompt": [1, 2, 3]}
    gateway.services.fleet._placement._max_in_flight = 0
    try:
        (decision,) = admin.post(path, json=body).json()["decisions"]
    finally:
        gateway.services.fleet._placement._max_in_flight = 256
    assert (decision["node_id"], decision["reason"]) == (None, "no_capacity")
    assert decision["rejected"] == [{"node_id": "n1", "why": "full"}]
    assert decision["retry_after_s"] > 0
