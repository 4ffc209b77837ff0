"""docs/admin.md is true: its examples run, answers have its fields, its table is the table."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from typer.main import get_command

from gateway.cli.admin import admin_app
from gateway.routes import ADMIN_ROUTES

PAGE = (Path(__file__).resolve().parents[3] / "docs/admin.md").read_text()
EXAMPLES = re.findall(r"```sh\n(.*?)```\n```json\n(.*?)```", PAGE, re.DOTALL)


def form(value: Any) -> Any:
    """What an answer is made of: its fields, and the form of the first of many."""
    if isinstance(value, dict):
        fields = {name: form(item) for name, item in value.items()}
        if "models" in fields:  # by name
            fields["models"] = form(next(iter(value["models"].values())))
        return fields
    if isinstance(value, list):
        return [form(item) for item in value[:1]]
    return "a value"


def values(text: str) -> list[Any]:
    """JSON values one after another."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        found.append(value)
    return found


def test_every_example_runs_and_answers_as_it_says(gateway, admin, chat) -> None:
    assert len(EXAMPLES) == PAGE.count("```sh") == PAGE.count("```json") == 16
    chat({"say": "x", "pad": "z" * 200}, x_session_affinity="conversation-1")
    request_id = chat({"say": "x", "pad": "z" * 200}, x_session_affinity="conversation-1")
    admin.post("/admin/v1/keys", json={"name": "a second one"})
    row = admin.get(f"/admin/v1/requests/{request_id}").json()
    names = {
        "ADMIN": gateway.addresses.admin_url,
        "TOKEN": gateway.services.home.admin_token,
        "REQUEST_ID": request_id,
        "SESSION": row["session"],
    }
    for command, told in EXAMPLES:
        done = subprocess.run(
            ["sh", "-c", command],
            env={"PATH": os.environ["PATH"], "no_proxy": "*", **names},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        answered, promised = values(done.stdout), values(told)
        assert list(map(form, answered)) == list(map(form, promised)), command
        if "drain" in command:
            assert answered == promised


def test_the_pages_table_is_the_table_of_routes() -> None:
    told = set(re.findall(r"^\| `([A-Z]+) (/admin/v1/[^`]*)` \|", PAGE, re.MULTILINE))
    routed = {
        (method, route.path.replace(":rest}", "}"))
        for route in ADMIN_ROUTES
        for method in route.methods
        if method != "HEAD" and route.role == "operator"
    }
    assert told == routed


def test_the_pages_commands_are_the_commands() -> None:
    group = get_command(admin_app)
    assert hasattr(group, "commands")
    groups = {name: one for name, one in group.commands.items() if hasattr(one, "commands")}
    real = {f"{name} {inner}" for name, one in groups.items() for inner in one.commands}
    real |= set(group.commands) - set(groups)
    told = re.findall(rf"`kagari admin ((?:(?:{'|'.join(groups)}) )?[a-z]+)", PAGE)
    assert set(told) == real
