"""A hub on loopback: one port answers the API and small files, another hands out large ones."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_BYTES = 2000  # from here on a file is in large file storage


@dataclass
class Seen:
    """A request: at which port, its path, its headers in lower case."""

    port: int
    path: str
    headers: dict[str, str]


@dataclass
class FakeHub:
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)  # repository → commit of main
    # path of a file → what happens to its next requests, in order
    faults: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    extra_tree: list[dict[str, object]] = field(default_factory=list)
    needs_token: str | None = None
    page_size: int = 1000
    bytes_per_s: int | None = None
    seen: list[Seen] = field(default_factory=list)
    api_port: int = 0
    store_port: int = 0
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    def add(self, repo: str, files: dict[str, bytes]) -> str:
        """A new commit of main; returns it."""
        named = json.dumps({path: hashlib.sha1(data).hexdigest() for path, data in files.items()})
        commit = hashlib.sha1(named.encode()).hexdigest()
        self.repos[f"{repo}@{commit}"] = files
        self.heads[repo] = commit
        return commit

    def requests_of(self, path: str) -> list[Seen]:
        """Of a file's bytes, wherever they were asked for."""
        return [seen for seen in self.seen if unquote(seen.path).endswith(f"/{path}")]

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        servers = [_Server(self), _Server(self)]
        self.api_port, self.store_port = (server.server_address[1] for server in servers)
        threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,)) for server in servers
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for server in servers:
                server.shutdown()
                server.server_close()
            for thread in threads:
                thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, hub: FakeHub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        hub, port = self.server.hub, self.server.server_address[1]
        headers = {name.lower(): value for name, value in self.headers.items()}
        with hub.lock:
            hub.seen.append(Seen(port, self.path, headers))
        try:
            if port == hub.store_port:
                self._file(*unquote(self.path).split("/", 3)[1:])
            else:
                self._api(headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _api(self, headers: dict[str, str]) -> None:
        hub = self.server.hub
        parts = urlsplit(self.path)
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        if hub.needs_token and headers.get("authorization") != f"Bearer {hub.needs_token}":
            return self._answer(401, b'{"error": "no"}')
        if words[:2] == ["api", "models"] and len(words) == 2:
            return self._json([{"id": repo} for repo in hub.heads])
        if words[:2] == ["api", "models"] and len(words) >= 5:
            repo, kind, revision = "/".join(words[2:4]), words[4], "/".join(words[5:])
            commit = hub.heads.get(repo) if revision == "main" else revision
            files = hub.repos.get(f"{repo}@{commit}")
            if self._fault(f"{kind}"):
                return None
            if files is None:
                return self._answer(404, b'{"error": "Repository not found"}')
            if kind == "revision":
                return self._json({"sha": commit, "siblings": [{"rfilename": n} for n in files]})
            return self._tree(files, int(parse_qs(parts.query).get("cursor", ["0"])[0]))
        if len(words) >= 5 and words[2] == "resolve":
            return self._file("/".join(words[:2]), words[3], "/".join(words[4:]))
        return self._answer(404, b"{}")

    def _tree(self, files: dict[str, bytes], cursor: int) -> None:
        hub = self.server.hub
        entries: list[dict[str, object]] = [
            {"type": "directory", "path": "onnx", "oid": "0" * 40, "size": 0}
        ]
        for path, data in files.items():
            entry: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
            if len(data) >= LARGE_BYTES:
                digest = hashlib.sha256(data).hexdigest()
                entry |= {"oid": "1" * 40, "lfs": {"oid": digest, "size": len(data)}}
            else:
                entry["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entries.append(entry)
        entries += hub.extra_tree
        end = cursor + hub.page_size
        more = {}
        if end < len(entries):
            path = self.path.partition("?")[0]
            more["Link"] = f'<{hub.url}{path}?recursive=true&cursor={end}>; rel="next"'
        self._json(entries[cursor:end], more)

    def _file(self, repo: str, commit: str, path: str) -> None:
        hub = self.server.hub
        if "/" not in repo:  # at the store: /ORG%2FNAME/COMMIT/PATH came unquoted
            repo, commit, path = f"{repo}/{commit}", *path.split("/", 1)
        data = hub.repos.get(f"{repo}@{commit}", {}).get(path)
        if data is None:
            return self._answer(404, b"Entry not found")
        at_store = self.server.server_address[1] == hub.store_port
        if len(data) >= LARGE_BYTES and not at_store:
            location = f"http://127.0.0.1:{hub.store_port}/{repo}/{commit}/{path}"
            return self._answer(302, b"", {"Location": location})
        return self._send(data, path)

    def _send(self, data: bytes, path: str) -> None:
        hub = self.server.hub
        fault = hub.faults.get(path) or [("", 0)]
        kind, number = fault.pop(0) if hub.faults.get(path) else ("", 0)
        if kind == "status":
            return self._answer(number, b"", {"Retry-After": "7"})
        start = 0
        asked = self.headers.get("Range")
        if asked and kind != "ignore range":
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                return self._answer(416, b"")
        body = data[start:]
        if kind == "wrong":
            body = bytes(byte ^ 1 for byte in body)
        with hub.lock:
            hub.at_once += 1
            hub.most_at_once = max(hub.most_at_once, hub.at_once)
        try:
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if kind == "cut":
                self.wfile.write(body[:number])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
            elif kind == "drip":
                for byte in body[:number]:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)
                self.connection.shutdown(socket.SHUT_RDWR)
            elif hub.bytes_per_s is None:
                self.wfile.write(body)
            else:
                for place in range(0, len(body), 4096):
                    self.wfile.write(body[place : place + 4096])
                    time.sleep(4096 / hub.bytes_per_s)
        finally:
            with hub.lock:
                hub.at_once -= 1
        return None

    def _fault(self, kind: str) -> bool:
        waiting = self.server.hub.faults.get(kind)
        if not waiting:
            return False
        _, status = waiting.pop(0)
        self._answer(status, b"", {"Retry-After": "7"})
        return True

    def _json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self._answer(200, json.dumps(value).encode(), headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
