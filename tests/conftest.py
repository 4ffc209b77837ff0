"""Shared by all tests: the async backend, interpreted Triton, where the recordings lie."""

import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before a kernel is imported

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recordings beside the project; a test that needs it says so when absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"recordings absent: {folder.name}/ is not beside the project")
    return folder
