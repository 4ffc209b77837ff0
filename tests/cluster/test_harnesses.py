"""Agent harnesses as users run them, headless, against a whole Kagari; `make clients` first."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.demo.stack import Stack

pytestmark = pytest.mark.slow

Balanced = Callable[[Stack], list[dict[str, Any]]]
TASK = "Write a file made.txt that holds the word ready."
CALL = (
    "I will write it.\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command": "echo ready > made.txt", '
    '"description": "Write the file"}}\n</tool_call>'
)
DONE = "The file made.txt is written."
REPLIES = [
    {"if": "(?i)generate a (short )?title", "say": "A file"},
    {"if": "<tool_response>", "say": DONE},
    {"if": "<tools>", "say": CALL},
]


def program(client: str, name: str) -> Path:
    """A client's program. Fails, not skips: who runs slow tests wants to know."""
    default = Path.home() / ".cache" / "kagari" / "clients"
    folder = Path(os.environ.get("KAGARI_CLIENTS", default)) / client
    found = folder / "node_modules" / ".bin" / name
    if not found.exists():
        pytest.fail(f"{client} is absent: run make clients, which installs it in {folder}")
    return found


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """An empty git repository; its parent is the client's fresh HOME."""
    folder = tmp_path / "work"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=30)
    return folder


@pytest.fixture
def replies(tmp_path: Path) -> Path:
    path = tmp_path / "replies.json"
    path.write_text(json.dumps(REPLIES))
    return path


def run(
    workplace: Path, command: list[str | Path], *, timeout_s: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """With nothing of this machine's but its PATH."""
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=workplace,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(workplace.parent),
            "TERM": "dumb",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout[-4000:], ended.stderr[-4000:])
    return ended


def gateway_lines(stack: Stack) -> list[dict[str, Any]]:
    """What the gateway's log says of each completion, in order."""
    lines = [
        json.loads(line)
        for log in sorted((stack.home / "logs").glob("*.log"))
        for line in log.read_text().splitlines()
        if line.startswith("{")
    ]
    return [line for line in lines if line.get("path") == "mixed"]


def test_opencode_finishes_a_task(
    tmp_path: Path, workplace: Path, replies: Path, balanced: Balanced
) -> None:
    opencode = program("opencode", "opencode")
    model = "smollm2-135m-32k"
    flags = ("--model", model, "--port", "0", "--script", str(replies))
    with Stack(tmp_path / "kagari", *flags) as stack:
        config = {
            "provider": {
                "kagari": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "Kagari",
                    "options": {"baseURL": stack.ready["url"], "apiKey": stack.api.secret},
                    "models": {
                        model: {"name": model, "limit": {"context": 32_768, "output": 2_048}}
                    },
                }
            },
            "model": f"kagari/{model}",
            "small_model": f"kagari/{model}",
            "permission": {"bash": "allow"},
            "autoupdate": False,
            "share": "disabled",
        }
        (workplace / "opencode.json").write_text(json.dumps(config))
        ended = run(workplace, [opencode, "run", "--format", "json", TASK])
        rows = balanced(stack)
        lines = gateway_lines(stack)
    assert DONE in ended.stdout
    check_task(workplace, rows, lines)


def check_task(workplace: Path, rows: list[dict[str, Any]], lines: list[dict[str, Any]]) -> None:
    """The tool ran, and the turn after it found the pages of the turn before, in one session."""
    assert (workplace / "made.txt").read_text() == "ready\n"
    assert {row["status"] for row in rows} == {"ok"}
    assert {line["affinity_source"] for line in lines} == {"x-session-affinity"}
    called, closing = (line for line in lines if line["prompt_tokens"] > 1_000)
    assert (called["finish"], closing["finish"]) == ("tool_calls", "stop")
    assert closing["affinity"] == "hit"
    assert closing["cached_tokens"] >= called["prompt_tokens"] - 64


def pi_command(stack: Stack, workplace: Path, *flags: str, max_tokens: int) -> list[str | Path]:
    config = {
        "providers": {
            "kagari": {
                "baseUrl": stack.ready["url"],
                "api": "openai-completions",
                "apiKey": stack.api.secret,
                "compat": {"sendSessionAffinityHeaders": True},
                "models": [
                    {"id": stack.model, "contextWindow": 8_192, "maxTokens": max_tokens},
                ],
            }
        }
    }
    folder = workplace.parent / ".pi" / "agent"
    folder.mkdir(parents=True)
    (folder / "models.json").write_text(json.dumps(config))
    # It keeps 16,384 tokens free for a summary, more than this window: else each turn asks for one.
    (folder / "settings.json").write_text(json.dumps({"compaction": {"enabled": False}}))
    choice = ("--provider", "kagari", "--model", stack.model)
    return [program("pi", "pi"), "-p", "--offline", *choice, *flags, TASK]


def test_pi_finishes_a_task(
    tmp_path: Path, workplace: Path, replies: Path, balanced: Balanced
) -> None:
    with Stack(tmp_path / "kagari", "--port", "0", "--script", str(replies)) as stack:
        ended = run(workplace, pi_command(stack, workplace, max_tokens=512))
        rows = balanced(stack)
        lines = gateway_lines(stack)
    assert DONE in ended.stdout
    check_task(workplace, rows, lines)


def test_pi_ends_a_run_on_the_real_model(
    tmp_path: Path, workplace: Path, balanced: Balanced
) -> None:
    """So small a model may say anything, so it gets a tool that cannot change a file."""
    with Stack(tmp_path / "kagari", "--port", "0") as stack:
        command = pi_command(stack, workplace, "--tools", "read", "--mode", "json", max_tokens=48)
        ended = run(workplace, command, timeout_s=600)
        rows = balanced(stack)
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    said = [event["message"] for event in events if event["type"] == "message_end"]
    answers = [message for message in said if message["role"] == "assistant"]
    assert len(answers) == len(rows) > 0
    assert {row["status"] for row in rows} == {"ok"}
    assert all(message.get("errorMessage") is None for message in answers)
    assert {message["stopReason"] for message in answers} <= {"stop", "length", "toolUse"}
