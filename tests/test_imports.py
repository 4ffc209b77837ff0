"""Imports point one way: gateway → policies and node_agent → engine → policies."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"policies", "engine", "node_agent", "gateway"}
MAY_IMPORT = {
    "policies": {"policies"},
    "engine": {"engine", "policies"},
    "node_agent": {"node_agent", "engine", "policies"},
    "gateway": {"gateway", "policies"},
}
# What a folder may never import, at any depth.
NEVER = {
    "gateway": {"torch", "triton", "numpy", "transformers", "pickle"},
    "engine/schedule": {"torch", "triton", "numpy", "asyncio", "socket"},
    "policies": {"asyncio", "socket", "threading", "random", "time", "os", "subprocess", "pickle"},
    "engine": {"pickle"},
    "node_agent": {"pickle"},
}
# A library that may be imported in one place only, so that it can be exchanged.
ONE_HOME = {"hypercorn": "gateway/server.py"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full dotted names, whether at the top, in a function or under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("package", sorted(OURS))
def test_packages_import_only_downwards(package) -> None:
    assert sources(package)
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imported(path)
        if (top := name.partition(".")[0]) in OURS and top not in MAY_IMPORT[package]
    }
    assert not wrong


@pytest.mark.parametrize("folder", sorted(NEVER))
def test_folder_never_imports(folder) -> None:
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imported(path)
        if name.partition(".")[0] in NEVER[folder]
    }
    assert not wrong


def test_policies_need_only_the_standard_library_and_msgspec() -> None:
    allowed = set(sys.stdlib_module_names) | {"msgspec", "policies"}
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("policies")
        for name in imported(path)
        if name.partition(".")[0] not in allowed
    }
    assert not wrong


@pytest.mark.parametrize("library", sorted(ONE_HOME))
def test_library_has_one_home(library) -> None:
    homes = {
        str(path.relative_to(ROOT))
        for package in OURS
        for path in sources(package)
        for name in imported(path)
        if name.partition(".")[0] == library
    }
    assert homes == {ONE_HOME[library]}


def test_httpx_is_imported_by_one_module_of_each_process() -> None:
    """The gateway speaks to foreign servers, the node agent to a hub; neither imports the other."""
    homes = {
        str(path.relative_to(ROOT))
        for package in OURS
        for path in sources(package)
        for name in imported(path)
        if name.partition(".")[0] == "httpx"
    }
    assert homes == {"gateway/upstreams/transport.py", "node_agent/hub_http.py"}


def test_engine_init_imports_nothing() -> None:
    assert list(imported(ROOT / "engine" / "__init__.py")) == []
