"""Tokenizer bundles: fetched from nodes in parts, verified, kept on disk, loaded in a thread."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gateway.nodes.memory import release_free_memory
from policies.contract.bundle import Bundle, bundle_digest, decode_bundle
from policies.contract.wire import BUNDLE_PART_BYTES, BundlePart

if TYPE_CHECKING:
    from gateway.text.model import TextModel

log = structlog.get_logger("kagari.nodes")

MAX_PARTS = 64  # of 1 MiB: the largest tokenizers known are about 35 MB
MAX_BUNDLES = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BundleError(Exception):
    """A node's bundle parts are not what was announced; the message says which rule they broke."""


def is_digest(text: str) -> bool:
    """Digests name files: anything but 64 hex digits is refused."""
    return _DIGEST.fullmatch(text) is not None


class Assembly:
    """Parts of one bundle from one link, in order, bounded, checked against the digest."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self._parts: list[bytes] = []
        self._count = 0

    def add(self, part: BundlePart) -> bytes | None:
        """The whole bundle after its last part, else None. Raises BundleError."""
        if part.index != len(self._parts):
            raise BundleError(f"part {part.index} came, part {len(self._parts)} was due")
        if part.index == 0:
            self._count = part.count
        if part.count != self._count or not 0 < part.count <= MAX_PARTS:
            raise BundleError(f"{part.count} parts announced, allowed are 1 to {MAX_PARTS}")
        if len(part.data) > BUNDLE_PART_BYTES:
            raise BundleError(f"a part has {len(part.data)} bytes, allowed {BUNDLE_PART_BYTES}")
        self._parts.append(part.data)
        if len(self._parts) < self._count:
            return None
        whole = b"".join(self._parts)
        if bundle_digest(whole) != self.digest:
            raise BundleError(f"bytes do not have the digest {self.digest}")
        return whole


class Bundles:
    """digest → TextModel. `run` loads what was added; until then a model is not servable."""

    def __init__(self, load: Callable[[Bundle], TextModel], directory: Path | None = None) -> None:
        self._load = load
        self._directory = directory
        self._text_by_digest: dict[str, TextModel] = {}
        self._loading: set[str] = set()
        self._jobs: asyncio.Queue[tuple[str, bytes | None]] = asyncio.Queue(MAX_BUNDLES)
        self.problem_by_digest: dict[str, str] = {}
        self._on_disk = self._scan()

    def text(self, digest: str) -> TextModel | None:
        return self._text_by_digest.get(digest)

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Digests a node should send; those on disk are queued for loading instead."""
        wanted: list[str] = []
        for digest in dict.fromkeys(digests):
            if digest in self._text_by_digest or digest in self._loading:
                continue
            if digest in self._on_disk:
                self._queue(digest, None)
            elif digest not in self.problem_by_digest:
                wanted.append(digest)
        return tuple(wanted)

    def add(self, digest: str, encoded: bytes) -> None:
        """Take a verified bundle; ignored when it is known already."""
        if digest not in self._text_by_digest and digest not in self._loading:
            self._queue(digest, encoded)

    def put(self, digest: str, text: TextModel) -> None:
        """Take a loaded model as it is."""
        self._text_by_digest[digest] = text

    async def run(self) -> None:
        """Load queued bundles, one at a time, in a thread; runs until cancelled."""
        while True:
            digest, encoded = await self._jobs.get()
            try:
                text = await asyncio.to_thread(self._read_and_load, digest, encoded)
            except Exception as error:  # whatever a tokenizer file makes its parser raise
                self.problem_by_digest[digest] = f"{type(error).__name__}: {error}"
                self._on_disk.discard(digest)
                log.error("bundle_refused", digest=digest, error=self.problem_by_digest[digest])
            else:
                self._text_by_digest[digest] = text
                log.info("bundle_loaded", digest=digest)
            finally:
                self._loading.discard(digest)

    def _queue(self, digest: str, encoded: bytes | None) -> None:
        try:
            self._jobs.put_nowait((digest, encoded))
        except asyncio.QueueFull:
            self.problem_by_digest[digest] = f"more than {MAX_BUNDLES} bundles wait to be loaded"
        else:
            self._loading.add(digest)

    def _read_and_load(self, digest: str, encoded: bytes | None) -> TextModel:
        if encoded is None:
            assert self._directory is not None
            encoded = (self._directory / digest).read_bytes()
        try:
            text = self._load(decode_bundle(encoded))
        except Exception:
            raise
        except BaseException as panic:  # of the tokenizers library; a thread sees no other kind
            raise BundleError(f"the tokenizer library panicked: {panic}") from panic
        release_free_memory()
        if self._directory is not None and digest not in self._on_disk:
            self._directory.mkdir(parents=True, exist_ok=True)
            part = self._directory / f"{digest}.part"
            part.write_bytes(encoded)
            os.replace(part, self._directory / digest)
        return text

    def _scan(self) -> set[str]:
        """Bundles on disk that are whole; the newest MAX_BUNDLES stay."""
        if self._directory is None or not self._directory.is_dir():
            return set()
        files = [path for path in self._directory.iterdir() if is_digest(path.name)]
        files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        good: set[str] = set()
        for path in files:
            if len(good) < MAX_BUNDLES and bundle_digest(path.read_bytes()) == path.name:
                good.add(path.name)
            else:
                path.unlink()
        return good
