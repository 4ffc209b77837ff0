"""Pulls a model from a hub into a folder: verified, pinned to one commit, resumed after any end.

    models/hub/ORG/NAME/COMMIT/…       files of that commit; what is unfinished ends in `.part`
    models/hub/ORG/NAME/REVISION.json  what the last whole pull of a revision brought

The record is written last. Who serves a model reads it, and needs no network as long as all its
files are there; a branch that moves meanwhile is followed by the next pull alone.
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct

from node_agent.catalogue import CheckpointFormat, nearest
from node_agent.disk import disk_error, locked, sync_folder, write_atomically
from node_agent.errors import NodeError
from node_agent.hub import Choice, HubFile, HubName, choose, parse_commit, parse_tree
from node_agent.hub_http import HubHttp, Interrupted, NotThere
from node_agent.pull import Progress

CHUNK_BYTES = 1 << 20
PARALLEL_DOWNLOADS = 4
POLL_S = 0.2
LOCK_S = 6 * 3600.0  # another process may be pulling many gigabytes
MAX_FILES = 20_000
SPARE_BYTES = 64 << 20  # that a disk keeps


class Record(Struct, frozen=True):
    """A whole pull, as REVISION.json keeps it."""

    name: str  # as it was asked for
    repo: str
    commit: str
    format: CheckpointFormat
    path: str
    files: tuple[HubFile, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """What a pull would bring."""

    commit: str
    choice: Choice


def repository_folder(name: HubName, folder: Path) -> Path:
    return folder / "hub" / name.repo


def read_record(name: HubName, folder: Path) -> Record | None:
    """The last pull of this name, if all its files are there in their sizes."""
    root = repository_folder(name, folder)
    try:
        record = msgspec.json.decode((root / f"{name.key}.json").read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None
    snapshot = root / record.commit
    return record if all(_is_whole(snapshot / file.path, file) for file in record.files) else None


def pulled_names(folder: Path) -> list[str]:
    """Of all whole pulls in folder."""
    names = []
    for file in sorted((folder / "hub").glob("*/*/*.json")):
        try:
            names.append(msgspec.json.decode(file.read_bytes(), type=Record).name)
        except (OSError, msgspec.MsgspecError):
            continue
    return names


def record_path(name: HubName, folder: Path, record: Record) -> Path:
    """What an engine opens: the snapshot's folder or its GGUF file."""
    return repository_folder(name, folder) / record.commit / record.path


def _is_whole(path: Path, file: HubFile) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == file.num_bytes


def list_model(name: HubName, http: HubHttp) -> Listing:
    """Asks the hub for the commit that the revision means and for its files. Raises NodeError."""
    api = f"/api/models/{quote(name.repo)}"
    try:
        commit = parse_commit(http.get_json(f"{api}/revision/{quote(name.revision, safe='')}")[0])
        files: list[HubFile] = []
        page: str | None = f"{api}/tree/{commit}?recursive=true"
        while page is not None:
            body, page = http.get_json(page)
            files += parse_tree(body)
            if len(files) > MAX_FILES:
                raise NodeError(
                    f"--model {name.text}",
                    found=f"more than {MAX_FILES} files",
                    allowed=f"a repository with at most {MAX_FILES}",
                    remedy="this is no model: name another repository",
                )
    except NotThere as missing:
        close = _similar(name, http)
        raise NodeError(
            f"--model {name.text}",
            found=f"no such folder here, no such repository or revision on {http.endpoint}",
            allowed="ORG/NAME, with @REVISION and :FILE.gguf where wanted",
            remedy=f"did you mean {' or '.join(close)}?" if close else "check the spelling",
        ) from missing
    return Listing(commit, choose(name, files))


def _similar(name: HubName, http: HubHttp) -> list[str]:
    """Names that the hub's search finds; a hub without one is no second fault."""
    word = quote(name.repo.partition("/")[2], safe="")
    try:
        found = msgspec.json.decode(
            http.get_json(f"/api/models?search={word}&limit=20")[0], type=list[dict[str, object]]
        )
    except (NotThere, NodeError, msgspec.MsgspecError):
        return []
    return nearest(name.repo, [str(model["id"]) for model in found if "id" in model])


def pull_from_hub(
    name: HubName,
    folder: Path,
    *,
    http: HubHttp,
    progress: Progress = lambda *_: None,
    refresh: bool = True,
) -> Record:
    """The model's files, fetched where they are absent. Blocks; run it in a thread.

    refresh=False takes a whole earlier pull as it is. Raises NodeError and what progress raises;
    then unfinished files stay, to be resumed, but none that is not verified has its final name.
    """
    root = repository_folder(name, folder)
    with locked(
        root / ".lock", timeout_s=LOCK_S, waiting=lambda: progress("wait for another pull", 0, 0)
    ):
        record = None if refresh else read_record(name, folder)
        if record is not None:
            return record
        listing = list_model(name, http)
        choice = listing.choice
        snapshot = root / listing.commit
        try:
            absent = [file for file in choice.files if not _is_whole(snapshot / file.path, file)]
            _require_space(folder, snapshot, absent)
            _Download(name, listing.commit, snapshot, http, progress).run(absent)
            record = Record(
                name.text, name.repo, listing.commit, choice.format, choice.path, choice.files
            )
            write_atomically(root / f"{name.key}.json", msgspec.json.encode(record))
        except OSError as error:
            raise disk_error(folder, error) from error
    return record


def still_to_fetch_bytes(name: HubName, listing: Listing, folder: Path) -> int:
    snapshot = repository_folder(name, folder) / listing.commit
    return sum(
        max(0, file.num_bytes - _done_bytes(snapshot / file.path))
        for file in listing.choice.files
        if not _is_whole(snapshot / file.path, file)
    )


def read_config(name: HubName, listing: Listing, http: HubHttp) -> dict[str, object] | None:
    """config.json as the hub has it, of GGUF repositories too; None where there is none."""
    try:
        body, _ = http.get_json(_resolve_path(name, listing.commit, "config.json"))
        return msgspec.json.decode(body, type=dict[str, object])
    except (NotThere, msgspec.MsgspecError):
        return None


def _resolve_path(name: HubName, commit: str, path: str) -> str:
    return f"/{quote(name.repo)}/resolve/{commit}/{quote(path)}"


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _done_bytes(path: Path) -> int:
    part = _part(path)
    return part.stat().st_size if part.is_file() else 0


def _require_space(folder: Path, snapshot: Path, absent: Sequence[HubFile]) -> None:
    need = sum(max(0, file.num_bytes - _done_bytes(snapshot / file.path)) for file in absent)
    free = shutil.disk_usage(folder).free
    if need and free < need + SPARE_BYTES:
        raise NodeError(
            f"folder {folder}",
            found=f"{free >> 20} MiB free",
            allowed=f"at least {(need + SPARE_BYTES >> 20) + 1} MiB for what is still to fetch",
            remedy="free space, or choose another folder with KAGARI_MODELS",
        )


class _Download:
    """The files of one pull and the threads that fetch them; its owner's thread tells progress."""

    def __init__(
        self, name: HubName, commit: str, snapshot: Path, http: HubHttp, progress: Progress
    ) -> None:
        self._name = name
        self._commit = commit
        self._snapshot = snapshot
        self._http = http
        self._progress = progress
        self._stop = threading.Event()
        self._done_by_file: dict[str, int] = {}  # each written by its one thread
        self._faults: queue.Queue[BaseException | None] = queue.Queue()

    def run(self, files: Sequence[HubFile]) -> None:
        """Returns when all are whole; raises the first fault. Threads end at their next chunk:
        they are daemons, because a read that waits cannot be woken."""
        if not files:
            return
        total = sum(file.num_bytes for file in files)
        waiting: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
        for file in sorted(files, key=lambda file: -file.num_bytes):
            waiting.put(file)
        count = min(PARALLEL_DOWNLOADS, len(files))
        for index in range(count):
            threading.Thread(
                target=self._work, args=(waiting,), name=f"pull-{index}", daemon=True
            ).start()
        try:
            while count:
                self._progress("download", sum(self._done_by_file.values()), total)
                try:
                    fault = self._faults.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                if fault is not None:
                    raise fault
                count -= 1
            self._progress("download", total, total)
        finally:
            self._stop.set()

    def _work(self, waiting: queue.SimpleQueue[HubFile]) -> None:
        try:
            while not self._stop.is_set():
                try:
                    file = waiting.get_nowait()
                except queue.Empty:
                    break
                self._fetch(file)
        except BaseException as fault:
            self._faults.put(fault)
        else:
            self._faults.put(None)

    def _fetch(self, file: HubFile) -> None:
        """Attempts until the file is whole; one that brings bytes begins the count anew."""
        target = self._snapshot / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = _part(target)
        attempt = 0
        while not self._stop.is_set():
            before = _done_bytes(target)
            if before > file.num_bytes:  # of another file
                part.unlink()
                continue
            try:
                if before < file.num_bytes or file.num_bytes == 0:
                    self._receive(file, part, before)
                break
            except Interrupted as interrupted:
                attempt = 0 if _done_bytes(target) > before + CHUNK_BYTES else attempt + 1
                if attempt >= self._http.timing.attempts:
                    raise self._http.gave_up(file.path, str(interrupted)) from interrupted
                self._stop.wait(self._http.pause_s(max(0, attempt - 1), interrupted))
            except NotThere as missing:
                raise NodeError(
                    f"hub: {file.path}",
                    found="no such file, though the hub listed it",
                    allowed="a file of the listed commit",
                    remedy="pull again",
                ) from missing
        if self._stop.is_set():
            return
        self._verify(file, part)
        part.replace(target)
        sync_folder(target.parent)

    def _receive(self, file: HubFile, part: Path, start: int) -> None:
        path = _resolve_path(self._name, self._commit, file.path)
        with self._http.open(path, start=start) as response:
            if response.status_code == 416:  # what is there is not its beginning
                part.unlink(missing_ok=True)
                raise Interrupted("the hub has no such range")
            if response.status_code == 200:
                start = 0
            elif not response.headers.get("content-range", "").startswith(f"bytes {start}-"):
                raise Interrupted("the hub sent another range")
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o644), "wb") as out:
                out.truncate(start)
                out.seek(start)
                done = start
                for chunk in self._http.chunks(response):
                    if self._stop.is_set():
                        return
                    done += len(chunk)
                    if done > file.num_bytes:
                        out.truncate(0)
                        raise _other_bytes(file, f"more than {file.num_bytes} bytes")
                    out.write(chunk)
                    self._done_by_file[file.path] = done
                out.flush()
                os.fsync(out.fileno())
        if done < file.num_bytes:
            raise Interrupted(f"{done} of {file.num_bytes} bytes")

    def _verify(self, file: HubFile, part: Path) -> None:
        """A file of another content is removed: it cannot be resumed."""
        if file.sha256 is not None:
            expected, digest = file.sha256, hashlib.sha256()
        elif file.git_sha1 is not None:  # as git names a blob
            expected, digest = (
                file.git_sha1,
                hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False),
            )
        else:
            return
        with part.open("rb") as source:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != expected:
            part.unlink()
            raise _other_bytes(file, digest.hexdigest(), expected)


def _other_bytes(file: HubFile, found: str, allowed: str | None = None) -> NodeError:
    return NodeError(
        f"{'SHA-256' if file.sha256 else 'SHA-1'} of {file.path}",
        found=found,
        allowed=allowed or f"{file.num_bytes} bytes",
        remedy="pull again; if it stays so, do not trust the hub or what is between",
    )
