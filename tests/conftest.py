"""Shared by all tests: the async backend, interpreted Triton, the recordings, whose turn it is."""

import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before a kernel is imported

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
WAITING = ("benchmarks", "cli", "cluster", "node_agent")  # folders that mostly wait for processes


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread files that wait evenly among those that compute, where several run at a time.

    In the order of their names most that wait come first, and meanwhile cores idle.
    """
    if not hasattr(config, "workerinput"):  # alone, an order that shares fixtures is better
        return
    waiting, computing = [], []
    for file in dict.fromkeys(item.path for item in items):
        is_waiting = file.relative_to(TESTS).parts[0] in WAITING
        (waiting if is_waiting else computing).append(file)
    place = {
        file: (at + 0.5) / len(group)
        for group in (waiting, computing)
        for at, file in enumerate(group)
    }
    items.sort(key=lambda item: place[item.path])


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
