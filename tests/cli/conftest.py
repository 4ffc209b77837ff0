"""Commands run as their users run them: in a process of their own, with a home of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Kagari = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children find the packages of this checkout, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def kagari(tmp_path: Path) -> Kagari:
    """Run `kagari …` with tmp_path/home as its home."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "gateway.cli.main", *arguments],
            env={
                **os.environ,
                "KAGARI_HOME": str(tmp_path / "home"),
                "KAGARI_MODELS": str(tmp_path / "models"),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
