"""Where state lives: the home folder, its secret files (0600) and the folder of models."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from gateway.cli.problem import Problem

KEY_PREFIX = "kg-"


def home_folder(home: Path | None) -> Path:
    """--home, else KAGARI_HOME, else ~/.local/share/kagari."""
    if home is not None:
        return home.expanduser().absolute()
    named = os.environ.get("KAGARI_HOME")
    return Path(named or "~/.local/share/kagari").expanduser().absolute()


def models_folder() -> Path:
    """KAGARI_MODELS, else ~/.cache/kagari/models."""
    named = os.environ.get("KAGARI_MODELS")
    return Path(named or "~/.cache/kagari/models").expanduser().absolute()


def prepare_home(home: Path) -> Path:
    """Create the folder for its owner alone. Raises Problem when it cannot be written."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        (home / "logs").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise Problem(
            "--home",
            found=f"{home}: {error.strerror}",
            allowed="a folder this user can create and write",
            remedy="pass --home DIR or set KAGARI_HOME to such a folder",
        ) from error
    return home


def secret_file(path: Path, prefix: str = "") -> str:
    """The secret in this file; a new one is drawn and written 0600 the first time."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        secret = path.read_text().strip()
        if not secret:
            raise Problem(
                str(path),
                found="an empty file",
                allowed="one line with the secret",
                remedy="delete the file; the next start writes a new secret",
            ) from None
        return secret
    secret = prefix + secrets.token_urlsafe(24)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
    return secret
