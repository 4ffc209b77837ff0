"""docs/traps.md tells the truth: each test that it names is there, and no trap is without one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| ([EGT]\d+) \|.*\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def functions_of(path: str) -> frozenset[str]:
    """Test functions, and the names that stateful machines' test cases are given."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_trap_has_tests_and_all_of_them_exist() -> None:
    rows = [match for match in ROW.finditer((ROOT / "docs/traps.md").read_text())]
    assert len(rows) > 40
    wrong: list[str] = []
    for row in rows:
        named = TEST.findall(row[0])
        if not named:
            wrong.append(f"{row[1]} names no test")
        wrong += [
            f"{row[1]}: {path}::{name}"
            for path, name in named
            if not (ROOT / path).is_file() or name not in functions_of(path)
        ]
    assert wrong == []


def test_no_trap_has_two_rows() -> None:
    numbers = [match[1] for match in ROW.finditer((ROOT / "docs/traps.md").read_text())]
    assert sorted(numbers) == sorted(set(numbers))
