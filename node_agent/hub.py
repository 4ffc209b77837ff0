"""Names on a Hugging Face-compatible hub, and which files of a repository make a model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct

from node_agent.catalogue import CheckpointFormat
from node_agent.errors import NodeError

DEFAULT_ENDPOINT = "https://huggingface.co"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
GGUF_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
# Text files of a model; of weights only formats that cannot hold code.
TEXTS = re.compile(
    r"config\.json|generation_config\.json|tokenizer[\w.-]*\.json|special_tokens_map\.json"
    r"|chat_template\.jinja",
    re.ASCII,
)
# Which quantisation is taken when a repository has only GGUF files and none is named.
GGUF_ORDER = ("Q8_0", "Q4_K_M", "Q6_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "BF16", "F16", "F32")
MAX_TEXT_BYTES = 64 << 20
MAX_KEY_CHARS = 200

_PART = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_PART}(?:/{_PART})*))?"
    rf"(?::(?P<file>(?:{_PART}/)*{_PART}\.gguf))?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """ORG/NAME, ORG/NAME@REVISION, ORG/NAME:FILE.gguf or both."""

    text: str  # as it was asked for; the name it is served by
    repo: str
    revision: str = "main"
    file: str | None = None

    @property
    def key(self) -> str:
        """What of the repository is meant, fit to name a file."""
        key = quote(self.revision + (f":{self.file}" if self.file else ""), safe="")
        return key if len(key) <= MAX_KEY_CHARS else sha256(key.encode()).hexdigest()


def parse_hub_name(text: str) -> HubName | None:
    """None when text is no such name; a path that begins with '.', '/' or '~' never is one."""
    found = _NAME.fullmatch(text)
    if found is None or ".." in text:
        return None
    return HubName(text, found["repo"], found["revision"] or "main", found["file"])


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where the hub is and who asks. The token is for this endpoint alone and is never shown."""

    endpoint: str
    token: str | None
    is_offline: bool = False

    def __repr__(self) -> str:
        return f"HubSettings({self.endpoint!r}, token={'set' if self.token else None})"


def hub_settings(environment: Mapping[str, str] = os.environ) -> HubSettings:
    """HF_ENDPOINT, HF_HUB_OFFLINE and the token: HF_TOKEN, else the file of HF_TOKEN_PATH."""
    endpoint = (environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise NodeError(
            "HF_ENDPOINT",
            found=repr(endpoint),
            allowed="a URL that begins with https:// or http://",
            remedy=f"unset it, which means {DEFAULT_ENDPOINT}, or correct it",
        )
    offline = environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return HubSettings(endpoint, _token(environment), offline)


def _token(environment: Mapping[str, str]) -> str | None:
    token = environment.get("HF_TOKEN", "").strip()
    if not token:
        home = environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
        file = Path(environment.get("HF_TOKEN_PATH") or Path(home) / "token").expanduser()
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError):
            return None
    if not token.isascii() or not token.isprintable() or " " in token:
        raise NodeError(
            "HF_TOKEN",
            found="characters that no token has",
            allowed="one line of printable ASCII",
            remedy="copy the token again from the hub's settings page",
        )
    return token or None


class Lfs(Struct, frozen=True):
    oid: str = ""  # SHA-256


class TreeEntry(Struct, frozen=True):
    """One line of the hub's /tree answer."""

    type: str
    path: str
    size: int = 0
    oid: str = ""  # SHA-1 of the git blob
    lfs: Lfs | None = None


class HubFile(Struct, frozen=True):
    path: str
    num_bytes: int
    sha256: str | None = None  # of files in large file storage
    git_sha1: str | None = None  # of all others


@dataclass(frozen=True, slots=True)
class Choice:
    """The files that make the model; `path` is where it is opened, under the snapshot's folder."""

    format: CheckpointFormat
    path: str
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def parse_tree(data: bytes) -> list[HubFile]:
    """Raises NodeError on another answer and on a path that leaves the repository."""
    try:
        entries = msgspec.json.decode(data, type=list[TreeEntry])
    except msgspec.MsgspecError as error:
        raise _strange("list of files", str(error)) from error
    files = []
    for entry in entries:
        if entry.type != "file":
            continue
        parts = entry.path.split("/")
        if entry.size < 0 or "\\" in entry.path or not all(parts) or {".", ".."} & set(parts):
            raise _strange("list of files", f"the path {entry.path!r} of {entry.size} bytes")
        stored = entry.lfs.oid if entry.lfs else ""
        blob = None if stored else _hex(entry.oid, 40)
        files.append(HubFile(entry.path, entry.size, _hex(stored, 64), blob))
    return files


def parse_commit(data: bytes) -> str:
    """The commit that a revision means now."""
    try:
        commit = msgspec.json.decode(data, type=dict[str, object]).get("sha")
    except msgspec.MsgspecError as error:
        raise _strange("description of the model", str(error)) from error
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise _strange("description of the model", f"sha {commit!r}")
    return commit


def _hex(text: str, digits: int) -> str | None:
    return text if re.fullmatch(rf"[0-9a-f]{{{digits}}}", text) else None


def _strange(what: str, found: str) -> NodeError:
    return NodeError(
        f"hub: {what}",
        found=found[:200],
        allowed="what Hugging Face's hub API answers",
        remedy="check HF_ENDPOINT: it must name a hub, not a page or a proxy's login",
    )


def choose(name: HubName, files: Sequence[HubFile]) -> Choice:
    """The named GGUF file, else safetensors, else a GGUF file by GGUF_ORDER. Raises NodeError."""
    if name.file is not None:
        return _named_gguf(name, files)
    known = {file.path: file for file in files}
    weights = _safetensors(known)
    if weights is not None:
        for required in ("config.json", "tokenizer.json"):
            if required not in known:
                raise NodeError(
                    f"--model {name.text}",
                    found=f"safetensors without {required}",
                    allowed="a repository with config.json and tokenizer.json",
                    remedy="name a repository that has them, or a GGUF file: ORG/NAME:FILE.gguf",
                )
        texts = [file for path, file in known.items() if TEXTS.fullmatch(path)]
        for file in texts:
            if file.num_bytes > MAX_TEXT_BYTES:
                raise NodeError(
                    f"--model {name.text}: {file.path}",
                    found=f"{file.num_bytes} bytes",
                    allowed=f"at most {MAX_TEXT_BYTES} bytes of JSON or template",
                    remedy="this is no tokenizer or config: name another repository",
                )
        return Choice("safetensors", "", tuple([*texts, *weights]))
    return _preferred_gguf(name, files)


def _safetensors(known: Mapping[str, HubFile]) -> list[HubFile] | None:
    """As the engine opens a folder: the single file, or the index and every shard."""
    if SINGLE in known:
        return [known[SINGLE]]
    shards = {path: found for path in known if (found := SHARD.fullmatch(path))}
    if INDEX not in known or not shards:
        return None
    count = int(next(iter(shards.values()))[2])
    wanted = [f"model-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)]
    if count > len(known) or any(path not in known for path in wanted):
        return None
    return [known[INDEX], *(known[path] for path in wanted)]


def _named_gguf(name: HubName, files: Sequence[HubFile]) -> Choice:
    found = next((file for file in files if file.path == name.file), None)
    if found is None:
        ggufs = [file.path for file in files if file.path.endswith(".gguf")]
        raise NodeError(
            f"--model {name.text}",
            found="no such file in the repository",
            allowed=_listed(ggufs) or "nothing: it has no GGUF files",
            remedy="name one of these" if ggufs else f"name {name.repo} alone",
        )
    return _one_gguf(name, found)


def _preferred_gguf(name: HubName, files: Sequence[HubFile]) -> Choice:
    ggufs = [
        file
        for file in files
        if file.path.endswith(".gguf")
        and _NAME.fullmatch(f"{name.repo}:{file.path}")
        and not file.path.rpartition("/")[2].startswith("mmproj")
    ]
    if not ggufs:
        others = sorted({Path(file.path).suffix for file in files} & {".bin", ".pt", ".pth"})
        raise NodeError(
            f"--model {name.text}",
            found="no file that can be served" + f" (only {', '.join(others)})" * bool(others),
            allowed="model.safetensors (or all its shards and their index) or a .gguf file; "
            "files of pickle are never loaded, they may run code",
            remedy="name a repository with safetensors or GGUF",
        )
    whole = [file for file in ggufs if not GGUF_SHARD.search(file.path)]
    if len(whole) == 1:
        return _one_gguf(name, whole[0])
    for kind in GGUF_ORDER:
        fitting = [
            file
            for file in whole
            if re.search(rf"(?<![A-Za-z0-9]){kind}(?![A-Za-z0-9_])", file.path, re.IGNORECASE)
        ]
        if len(fitting) == 1:
            return _one_gguf(name, fitting[0])
    raise NodeError(
        f"--model {name.text}",
        found=f"{len(ggufs)} GGUF files, none of which is the obvious one",
        allowed=_listed([file.path for file in ggufs]),
        remedy=f"name one: {name.repo}:{ggufs[0].path}",
    )


def _one_gguf(name: HubName, file: HubFile) -> Choice:
    if GGUF_SHARD.search(file.path):
        raise NodeError(
            f"--model {name.text}",
            found=f"{file.path}, a GGUF file in several parts",
            allowed="a GGUF file in one part",
            remedy="name another quantisation, or the repository with safetensors",
        )
    return Choice("gguf", file.path, (file,))


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:20]) + (" …" if len(paths) > 20 else "")
