"""Keys and secret files of `serve`: drawn once, 0600, never in an argument."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.home import home_folder, models_folder, prepare_home, secret_file
from gateway.cli.problem import Problem
from gateway.cli.serve_key import serve_key


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_own_key_persists(tmp_path: Path) -> None:
    file, secret = serve_key(tmp_path, literal=None, file=None)
    assert serve_key(tmp_path, literal=None, file=None) == (file, secret)
    assert secret.startswith("kg-")
    assert len(secret) >= 32
    assert mode(file) == 0o600


def test_a_given_key_replaces_the_file_of_the_last_one(tmp_path: Path) -> None:
    first = serve_key(tmp_path, literal="a" * 16, file=None)
    second = serve_key(tmp_path, literal="b" * 16, file=None)
    assert first[0] == second[0]
    assert second[0].read_text() == "b" * 16 + "\n"
    assert mode(second[0]) == 0o600


def test_a_key_file_is_read_and_handed_on(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_text("0123456789abcdef\n")
    assert serve_key(tmp_path, literal=None, file=given) == (given, "0123456789abcdef")


@pytest.mark.parametrize("literal", ["short", "with a space in the middle", "x" * 15])
def test_a_weak_key_is_refused(tmp_path: Path, literal: str) -> None:
    with pytest.raises(Problem):
        serve_key(tmp_path, literal=literal, file=None)


def test_both_ways_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem):
        serve_key(tmp_path, literal="a" * 16, file=tmp_path / "key")


def test_an_empty_secret_file_is_an_error_not_an_empty_secret(tmp_path: Path) -> None:
    (tmp_path / "join.token").touch()
    with pytest.raises(Problem):
        secret_file(tmp_path / "join.token")


def test_home_is_the_flag_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAGARI_HOME", str(tmp_path / "named"))
    monkeypatch.setenv("KAGARI_MODELS", str(tmp_path / "models"))
    assert home_folder(tmp_path / "flag") == tmp_path / "flag"
    assert home_folder(None) == tmp_path / "named"
    assert models_folder() == tmp_path / "models"
    assert mode(prepare_home(home_folder(None))) == 0o700


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Problem):
        prepare_home(tmp_path / "file")
