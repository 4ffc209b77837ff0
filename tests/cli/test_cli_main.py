"""The command line as a whole: what it offers, how quickly, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

Kagari = Callable[..., subprocess.CompletedProcess[str]]

COMMANDS = (
    *("serve", "gateway", "node", "engine", "models", "keys", "usage", "ledger"),
    *("doctor", "config", "demo", "admin"),
)
# Each takes longer to import than a --help may take, or must never be in this process.
HEAVY = ("torch", "transformers", "tokenizers", "hypercorn", "websockets", "httpx", "sqlite3")


def test_help_names_every_command(kagari: Kagari) -> None:
    told = kagari("--help")
    assert told.returncode == 0
    for command in COMMANDS:
        assert f" {command} " in told.stdout


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; import gateway.cli.main; "
        f"sys.exit(', '.join(name for name in {HEAVY!r} if name in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_version(kagari: Kagari) -> None:
    told = kagari("--version")
    assert told.returncode == 0
    assert told.stdout.startswith("kagari 0.")


def test_a_wrong_flag_exits_2(kagari: Kagari) -> None:
    assert kagari("serve", "--prot", "1").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("serve", "--nodes", "0"), "--nodes"),
        (("serve", "--compute", "quick"), "--compute"),
        (("engine", "generate", "smollm2-135m", "Hello", "--compute", "quick"), "--compute"),
        (("serve", "--api-key", "short"), "--api-key"),
        (("serve", "--api-key-file", "/nonexistent/key"), "--api-key-file"),
        (("usage",), "ledger"),
        (("keys", "revoke", "nobody"), "key"),
        (("models", "pull", "no-such-model"), "--model no-such-model"),
        (("engine", "generate", "no-such-model", "Hello"), "--model no-such-model"),
    ],
)
def test_an_error_has_four_parts(kagari: Kagari, arguments: tuple[str, ...], field: str) -> None:
    told = kagari(*arguments)
    assert told.returncode in (1, 2)
    assert told.stdout == ""
    first, *parts = told.stderr.splitlines()
    assert first == f"error: {field}"
    assert [part.split(":")[0].strip() for part in parts] == ["found", "allowed", "remedy"]
    assert "Traceback" not in told.stderr
