"""Where the operator's commands find a gateway, and how they ask it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from gateway.cli.client import HttpError, Server, call
from gateway.cli.home import home_folder
from gateway.cli.problem import FAILED, MISUSED, Problem
from gateway.home import ADDRESSES_NAME
from gateway.ledger.files import LEDGER_NAME, has_writer

PAGE_ROWS = 1000
ANSWER_S = 10.0
NO_ANSWERS = (404, 409)  # the command was right and the answer is no
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin listener of one gateway."""

    server: Server

    def ask(
        self,
        method: str,
        path: str,
        *names: str,
        body: Any = None,
        query: Mapping[str, str | None] | None = None,
        patience_s: float = ANSWER_S,
    ) -> Any:
        """One call below /admin/v1; names are parts of the path. Raises Problem."""
        parts = "".join("/" + quote(name, safe="") for name in names)
        told = {name: value for name, value in (query or {}).items() if value is not None}
        target = f"/admin/v1{path}{parts}" + ("?" + urlencode(told) if told else "")
        try:
            return call(self.server, method, target, body, patience_s)
        except HttpError as error:
            raise refusal(error) from error
        except (OSError, HTTPException, ValueError) as error:
            raise Problem(
                "--url",
                found=f"no answer of a gateway at {self.server.url}: {error}",
                allowed="the admin address of a running gateway",
                remedy="start one with kagari serve, or pass --url",
                exit_code=FAILED,
            ) from error

    def pages(
        self, path: str, query: Mapping[str, str | None], rows: str, *, limit: int | None
    ) -> list[Any]:
        """The rows of as many pages as it takes."""
        found: list[Any] = []
        after: str | None = None
        while limit is None or len(found) < limit:
            most = PAGE_ROWS if limit is None else min(PAGE_ROWS, limit - len(found))
            page = self.ask("GET", path, query={**query, "limit": str(most), "after": after})
            found += page[rows]
            after = page["next"]
            if after is None:
                break
        return found

    def show(self, answer: Answer, table: Callable[[Answer], None], *, as_json: bool) -> None:
        if as_json:
            sys.stdout.write(json.dumps(answer) + "\n")
        else:
            table(answer)


def find_admin(
    *, home: Path | None, url: str | None, token: str | None, token_file: Path | None
) -> Admin:
    """Flags first, then what the gateway left in its home. Raises Problem."""
    folder = home_folder(home)
    if token is not None and token_file is not None:
        raise misused("--token", "a token and a file of one", "one of them")
    secret = token or read_token(token_file or folder / "admin.token")
    if not (secret.isascii() and secret.isprintable()):
        raise misused("--token", "characters that no token has", "the line in home/admin.token")
    return Admin(Server(checked(url) if url is not None else admin_url(folder), secret))


def admin_url(folder: Path) -> str:
    """A killed gateway leaves its addresses behind, and the token must not go to whoever took its
    port: only who holds the ledger's lock is this home's gateway."""
    try:
        told = json.loads((folder / ADDRESSES_NAME).read_text())
        url = str(told["admin_url"])
    except (OSError, ValueError, KeyError, TypeError):
        url = ""
    if not url or not has_writer(folder / LEDGER_NAME):
        raise Problem(
            "--home",
            found=f"no gateway that runs with {folder}",
            allowed="the home of a running gateway",
            remedy="start it with kagari serve, or pass --home DIR or --url",
            exit_code=FAILED,
        )
    return url


def checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        is_usable = False
    if not is_usable:
        raise misused("--url", url, "http://HOST:PORT")
    return url


def read_token(path: Path) -> str:
    try:
        token = path.expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        raise misused(
            "--token-file", f"{path}: {getattr(error, 'strerror', None) or 'no text'}",
            "a file with the operator's token",
        ) from error  # fmt: skip
    if not token:
        raise misused("--token-file", f"{path}: empty", "a file with the operator's token")
    return token


def read_prompt(file: Path) -> dict[str, Any]:
    """The parts of a request's body that its prompt is made of. Raises Problem."""
    told = read_body(file, "--file")
    return {name: told[name] for name in ("messages", "tools", "prompt") if name in told}


def read_body(file: Path, field: str) -> dict[str, Any]:
    """A request's body. Raises Problem that names the field."""
    allowed = "a JSON object with messages, or with prompt"
    try:
        told = json.loads(file.expanduser().read_text())
    except (OSError, ValueError) as error:
        raise misused(field, f"{file}: {error}", allowed) from error
    if not isinstance(told, dict):
        raise misused(field, f"{file}: no object", allowed)
    return told


def refusal(error: HttpError) -> Problem:
    """The four parts of the gateway's own error."""
    exit_code = FAILED if error.status in NO_ANSWERS or error.status >= 500 else MISUSED
    try:
        told = json.loads(error.body)["error"]
        parts = [str(told[name]) for name in ("found", "allowed", "remedy")]
        field = str(told["param"] or told["code"])
    except (ValueError, KeyError, TypeError):
        parts = [f"status {error.status}", "an answer of a gateway", "check --url"]
        field = "--url"
    if error.status == 401:
        field = "--token"
        parts[1:] = ["the operator's token", "pass --token-file FILE, or --home of this gateway"]
    return Problem(field, found=parts[0], allowed=parts[1], remedy=parts[2], exit_code=exit_code)


def misused(field: str, found: str, allowed: str) -> Problem:
    return Problem(field, found=found, allowed=allowed, remedy="see kagari admin --help")
