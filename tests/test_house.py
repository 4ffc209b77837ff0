"""The house keeps its own rules: files say what they are for, README and docs tell the truth."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from typer.main import get_command

from engine.config import EngineConfig
from gateway.cli.main import app
from gateway.config import load
from node_agent.config import ENGINE_FLAGS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "engine", "node_agent", "gateway")


def tracked() -> list[Path]:
    """Files of the commit, or of the folder where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [Path(line) for line in listed.stdout.splitlines()]
        return [path for path in paths if (ROOT / path).exists()]
    return [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]


def sources(folder: str) -> Iterator[Path]:
    for path in tracked():
        if path.suffix == ".py" and path.as_posix().startswith(f"{folder}/"):
            yield path


def test_every_source_file_says_what_it_is_for() -> None:
    silent = [
        str(path)
        for package in (*PACKAGES, "benchmarks")
        for path in sources(package)
        if (ROOT / path).read_text().strip()
        and not ast.get_docstring(ast.parse((ROOT / path).read_text()))
    ]
    assert silent == []


def test_no_drawer_names() -> None:
    drawers = {"utils", "helpers", "common", "misc"}
    assert [path for path in tracked() if path.stem in drawers] == []


def test_no_test_folder_is_a_package_and_names_are_unique() -> None:
    files = [path for path in sources("tests") if path.name != "conftest.py"]
    assert [path for path in files if path.name == "__init__.py"] == []
    names = [path.name for path in files]
    assert sorted(names) == sorted(set(names))


# --- the README ---------------------------------------------------------------------------------


def readme() -> str:
    return (ROOT / "README.md").read_text()


def tree_of_readme() -> list[str]:
    """Folders in the README's tree, as paths."""
    block = re.search(r"## The tree\n\n```\n(.*?)```", readme(), re.DOTALL)
    assert block is not None
    paths: list[str] = []
    parent = ""
    for line in block[1].splitlines():
        name = line.split()[0].rstrip("/")
        parent = name if not line.startswith(" ") else parent
        paths.append(name if name == parent else f"{parent}/{name}")
    return paths


def test_the_tree_in_the_readme_is_the_tree() -> None:
    told = tree_of_readme()
    assert sorted(told) == sorted(set(told))
    assert [path for path in told if not (ROOT / path).is_dir()] == []
    real = {path.parts[0] for path in tracked() if len(path.parts) > 1}
    real |= {
        "/".join(path.parts[:2])
        for path in tracked()
        if len(path.parts) > 2 and path.parts[0] in PACKAGES
    }
    assert real - set(told) == set()


def test_files_named_in_the_readme_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", readme())
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", readme())
    assert [name for name in (*links, *named) if not (ROOT / name).exists()] == []


def test_commands_in_the_readme_exist() -> None:
    command = get_command(app)
    assert hasattr(command, "commands")
    for words in re.findall(r"`kagari ([a-z ]+)", readme()):
        first, *rest = words.split()
        assert first in command.commands, words
        inner = command.commands[first]
        if rest and hasattr(inner, "commands"):
            assert rest[0] in inner.commands, words


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", readme(), re.MULTILINE))
    assert targets >= {"serve", "test", "demo"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_pin_satisfies_the_project_and_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    pins = {
        line.split("==")[0].lower().replace("_", "-"): line.split("==")[1]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in wanted:
        name = re.split(r"[><=;\s]", requirement)[0].lower().replace("_", "-")
        assert name in pins, f"{name} is not in constraints.txt"
        assert "+" not in pins[name], f"{name}: a local version cannot be installed elsewhere"


def test_every_setting_is_in_the_docs_with_its_default() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    told = dict(re.findall(r"^\| `([a-z_.]+)` \| (.+?) \| .+ \|$", page, re.MULTILINE))
    real = {
        name: "not set"
        if value is None
        else f"`{msgspec.json.encode(value, enc_hook=str).decode()}`"
        for name, value, _ in load(environment={}).rows()
    }
    assert told == real


def test_every_engine_flag_is_in_the_docs_with_its_default() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    told = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.+?) \| .+ \|$", page, re.MULTILINE))
    assert told.pop("--threads") == "cores ÷ engines"
    names = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    flags = {flag: names[flag[2:].replace("-", "_")] for flag in ENGINE_FLAGS}
    assert told == {flag: f"`{default}`" for flag, default in flags.items()}


def test_files_and_links_in_the_docs_exist() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        links = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
        named = [
            ROOT / name
            for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.[a-z]+)?)`", text)
            if name.split("/")[0] in (*PACKAGES, "tests", "benchmarks", "docs")
        ]
        assert [path for path in (*links, *named) if not path.exists()] == [], page.name
