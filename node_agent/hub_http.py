"""HTTP to a hub, the one place that imports httpx: redirects, retries, ranges and deadlines.

The token goes to the endpoint's own origin alone, over TLS or on this machine; a redirect to
another host goes without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from node_agent.errors import NodeError
from node_agent.hub import HubSettings

MAX_JSON_BYTES = 16 << 20
MAX_REDIRECTS = 5
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
RETRIED = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class HubTiming:
    connect_s: float = 10.0
    stall_s: float = 30.0  # without a byte, or with fewer than stall_bytes
    stall_bytes: int = 32 << 10
    attempts: int = 5  # in a row that bring nothing
    pause_s: float = 1.0  # before the second attempt; doubled before each later one
    max_pause_s: float = 60.0  # also of what Retry-After asks for


class Interrupted(Exception):
    """What came is too little or ended early: another attempt may go on from there."""

    def __init__(self, found: str, retry_after_s: float = 0.0) -> None:
        super().__init__(found)
        self.retry_after_s = retry_after_s


class NotThere(Exception):
    """404: the caller knows what was looked for."""


class HubHttp:
    """Shared by the threads of a pull."""

    def __init__(
        self,
        settings: HubSettings,
        timing: HubTiming | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.endpoint = settings.endpoint
        self.timing = timing or HubTiming()
        self._sleep = sleep
        origin = httpx.URL(settings.endpoint)
        self._origin = _origin(origin)
        may_send = origin.scheme == "https" or origin.host in LOCAL_HOSTS
        self._authorization = (
            {"Authorization": f"Bearer {settings.token}"} if settings.token and may_send else {}
        )
        self.has_token = settings.token is not None
        self._client = httpx.Client(
            timeout=httpx.Timeout(self.timing.stall_s, connect=self.timing.connect_s),
            headers={"User-Agent": "kagari", "Accept-Encoding": "identity"},
            follow_redirects=False,
            trust_env=origin.host not in LOCAL_HOSTS,
        )

    def close(self) -> None:
        self._client.close()

    def get_json(self, path: str) -> tuple[bytes, str | None]:
        """(body, path of the next page). Raises NodeError or NotThere."""
        found = ""
        for attempt in range(self.timing.attempts):
            try:
                return self._get_json(path)
            except Interrupted as interrupted:
                found = str(interrupted)
                if attempt + 1 < self.timing.attempts:
                    self._sleep(self.pause_s(attempt, interrupted))
        raise self.gave_up(path, found)

    def _get_json(self, path: str) -> tuple[bytes, str | None]:
        body = bytearray()
        with self.open(path) as response:
            for chunk in self.chunks(response):
                body += chunk
                if len(body) > MAX_JSON_BYTES:
                    raise _refused(path, f"more than {MAX_JSON_BYTES} bytes", "a short answer")
            return bytes(body), self._next_page(response)

    def pause_s(self, attempt: int, interrupted: Interrupted) -> float:
        wanted = max(self.timing.pause_s * 2.0**attempt, interrupted.retry_after_s)
        return min(wanted, self.timing.max_pause_s)

    def gave_up(self, what: str, found: str) -> NodeError:
        return NodeError(
            f"hub {self.endpoint}: {what}",
            found=f"{found}; {self.timing.attempts} attempts",
            allowed="an answer",
            remedy="check the network and HF_ENDPOINT, then pull again: it goes on where it was",
        )

    @contextmanager
    def open(self, path: str, *, start: int = 0) -> Iterator[httpx.Response]:
        """The answer to GET of a path of the endpoint, from byte `start` on where it can be.

        Raises Interrupted, NotThere or NodeError.
        """
        url = httpx.URL(self.endpoint + path)
        wanted = {"Range": f"bytes={start}-"} if start else {}
        for _ in range(MAX_REDIRECTS + 1):
            authorization = self._authorization if _origin(url) == self._origin else {}
            request = self._client.build_request("GET", url, headers={**wanted, **authorization})
            try:
                response = self._client.send(request, stream=True)
            except httpx.HTTPError as error:
                raise Interrupted(f"{type(error).__name__}: {error}"[:200]) from error
            try:
                if response.status_code in (301, 302, 303, 307, 308):
                    url = self._redirected(path, url, response)
                    continue
                self._check(path, response)
                yield response
                return
            finally:
                response.close()
        raise _refused(path, "redirects without end", f"at most {MAX_REDIRECTS} redirects")

    def _redirected(self, path: str, url: httpx.URL, response: httpx.Response) -> httpx.URL:
        target = url.join(response.headers.get("location", ""))
        if target.scheme not in ("http", "https") or (
            url.scheme == "https" and target.scheme != "https"
        ):
            raise _refused(path, f"a redirect to {target.scheme}://{target.host}", "https")
        return target

    def _check(self, path: str, response: httpx.Response) -> None:
        status = response.status_code
        if status in (200, 206, 416):
            return
        if status == 404:
            raise NotThere(path)
        if status in RETRIED:
            raise Interrupted(f"status {status}", _retry_after_s(response))
        if status in (401, 403):
            raise NodeError(
                f"hub {self.endpoint}: {path}",
                found=f"status {status} {'with' if self.has_token else 'without'} a token",
                allowed="a public repository, or one that this token's owner may read",
                remedy="check the name; for a gated model accept its licence on its page, then "
                "set HF_TOKEN or HF_TOKEN_PATH",
            )
        raise _refused(path, f"status {status}", "status 200")

    def chunks(self, response: httpx.Response) -> Iterator[bytes]:
        """Bytes as they come; a stream that only drips counts as one that stalls."""
        begun, count = time.monotonic(), 0
        try:
            for chunk in response.iter_raw():
                count += len(chunk)
                yield chunk
                now = time.monotonic()
                if now - begun > self.timing.stall_s:
                    if count < self.timing.stall_bytes:
                        raise Interrupted(f"{count} bytes in {now - begun:.0f} s")
                    begun, count = now, 0
        except httpx.HTTPError as error:
            raise Interrupted(f"{type(error).__name__}: {error}"[:200]) from error

    def _next_page(self, response: httpx.Response) -> str | None:
        """Only a page of the same endpoint is turned to."""
        link = response.links.get("next", {}).get("url")
        if not link:
            return None
        url = response.url.join(link)
        if _origin(url) != self._origin:
            raise _refused("next page", f"a page on {url.host}", "a page of the same hub")
        return str(url).removeprefix(self.endpoint)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    default = {"http": 80, "https": 443}.get(url.scheme)
    return url.scheme, url.host, url.port or default


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # a date
        return 0.0


def _refused(path: str, found: str, allowed: str) -> NodeError:
    return NodeError(
        f"hub: {path}",
        found=found,
        allowed=allowed,
        remedy="check HF_ENDPOINT: it must name a hub, not a page or a proxy's login",
    )
