"""What operators see of upstreams: the admin's list, its command, the doctor."""

from __future__ import annotations

import json
from dataclasses import asdict

import httpx
from typer.testing import CliRunner

from gateway.cli.doctor import check_upstreams
from gateway.cli.main import app
from tests.gateway.upstreams.conftest import until
from tests.gateway.upstreams.scripted_upstream import Exchange, start_upstream


def test_operators_see_every_server_and_what_is_wrong_with_it(relayed) -> None:
    with (
        start_upstream(lambda _: Exchange()) as good,
        start_upstream(lambda _: Exchange(), list_status=401) as bad,
        relayed(
            {"url": good.url, "name": "good"}, {"url": bad.url, "name": "bad"}, serving=1
        ) as gateway,
    ):
        until(lambda: gateway.services.upstreams.servers[1].problem)
        home = gateway.services.home
        answer = httpx.get(
            gateway.addresses.admin_url + "/admin/v1/upstreams",
            headers={"authorization": f"Bearer {home.admin_token}"},
            trust_env=False,
        ).json()["upstreams"]
        assert [(one["name"], one["state"]) for one in answer] == [("good", "up"), ("bad", "down")]
        assert answer[0]["models"] == ["their-model"]
        assert "401" in answer[1]["problem"]
        shown = CliRunner().invoke(app, ["admin", "upstreams", "--home", str(home.folder)])
        assert shown.exit_code == 0
        assert "good" in shown.output
        told = CliRunner().invoke(app, ["admin", "upstreams", "--json", "--home", str(home.folder)])
        assert [one["name"] for one in json.loads(told.output)] == ["good", "bad"]
        found = [asdict(one) for one in check_upstreams(home.folder)]
        assert [(one["check"], one["verdict"]) for one in found] == [
            ("upstream good", "ok"),
            ("upstream bad", "note"),
        ]
        assert "401" in found[1]["found"]
    assert check_upstreams(home.folder) == []
