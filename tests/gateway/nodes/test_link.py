"""The link over real sockets: who may join, what a hostile or silent peer gets, bundles."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.nodes import link
from gateway.nodes.bundles import Assembly, BundleError, Bundles
from gateway.nodes.fleet import Fleet
from gateway.nodes.link import LinkServer
from policies.contract import wire
from policies.contract.bundle import Bundle, bundle_digest, encode_bundle
from tests.gateway.nodes.fake_node import Clock, bundles, info, request

TOKEN = "a join token"
WAIT_S = 20.0


@asynccontextmanager
async def serving(fleet: Fleet) -> AsyncIterator[str]:
    async with LinkServer(fleet, join_token=TOKEN).serve("127.0.0.1", 0) as port:
        yield f"ws://127.0.0.1:{port}/link/v1"


def dial(url: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "additional_headers": {"Authorization": f"Bearer {TOKEN}"},
        "compression": None,
        "max_size": wire.MAX_FRAME_BYTES,
        "close_timeout": 1,
    }
    return connect(url, **(settings | changes))


def hello(node_id: str = "n1", *infos: wire.EngineInfo, version: int = wire.WIRE_VERSION) -> bytes:
    return wire.encode(wire.Hello(version, version, node_id, 1, "mixed", infos or (info(),)))


async def receive(socket: ClientConnection) -> Any:
    async with asyncio.timeout(WAIT_S):
        frame = await socket.recv()
    assert isinstance(frame, bytes)
    return wire.decode_from_gateway(frame)


async def drain(socket: ClientConnection) -> None:
    try:
        async for _ in socket:
            continue
    except ConnectionClosed:
        return  # closed with an error code, which is what the caller looks at


async def close_of(socket: ClientConnection) -> tuple[int, str]:
    async with asyncio.timeout(WAIT_S):
        await drain(socket)
        await socket.wait_closed()
    assert socket.close_code is not None
    return socket.close_code, socket.close_reason or ""


async def until(fact: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not fact():  # noqa: ASYNC110 (the fact is in another object's books)
            await asyncio.sleep(0.01)


@pytest.mark.anyio
async def test_a_request_over_a_real_link() -> None:
    fleet = Fleet(bundles())
    async with serving(fleet) as url, dial(url) as socket:
        await socket.send(hello())
        welcome = await receive(socket)
        assert welcome == wire.Welcome(wire.WIRE_VERSION, "gateway", ())
        with fleet.dispatch(request(1)) as stream:
            submit = await receive(socket)
            await socket.send(wire.encode(wire.Step(0, 1, list(submit.lanes), [42])))
            async with asyncio.timeout(WAIT_S):
                assert (await stream.next())[0].tokens == [42]
        assert await receive(socket) == wire.Abort(submit.lanes)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "authorization", "status"),
    [
        ("/link/v1", "Bearer wrong", 401),
        ("/link/v1", "Bearer", 401),
        ("/link/v1", None, 401),
        ("/link/v1", "Basic a join token", 401),
        ("/link/v1", f"Bearer {TOKEN}, Bearer {TOKEN}", 401),
        ("/link/v2", f"Bearer {TOKEN}", 404),
        ("/", f"Bearer {TOKEN}", 404),
    ],
)
async def test_handshake_refuses(path: str, authorization: str | None, status: int) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with serving(Fleet(bundles())) as url:
        with pytest.raises(InvalidStatus) as refused:
            async with dial(url.removesuffix("/link/v1") + path, additional_headers=headers):
                raise AssertionError("joined")
    assert refused.value.response.status_code == status


@pytest.mark.anyio
async def test_two_credentials_are_none() -> None:
    twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer other")]
    async with serving(Fleet(bundles())) as url:
        with pytest.raises(InvalidStatus) as refused:
            async with dial(url, additional_headers=twice):
                raise AssertionError("joined")
    assert refused.value.response.status_code == 401


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("first", "code"),
    [
        (hello(version=99), "wire_version"),
        (wire.encode(wire.Draining()), "bad_hello"),
        (b"junk", "bad_hello"),
        ("text", "bad_hello"),
    ],
)
async def test_a_refused_node_is_told_why(first: bytes | str, code: str) -> None:
    fleet = Fleet(bundles())
    async with serving(fleet) as url, dial(url) as socket:
        await socket.send(first)
        refused = await receive(socket)
        assert isinstance(refused, wire.Refused)
        assert refused.code == code
        close_code, reason = await close_of(socket)
    assert close_code == link.REFUSED_CODE
    assert reason.startswith(f"{code}: ")
    assert fleet.nodes() == []


@pytest.mark.anyio
async def test_a_peer_without_a_hello_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HELLO_TIMEOUT_S", 0.1)
    async with serving(Fleet(bundles())) as url, dial(url) as socket:
        assert (await close_of(socket))[1].startswith("hello_late")


@pytest.mark.anyio
async def test_an_oversized_frame_ends_the_link() -> None:
    fleet = Fleet(bundles())
    async with serving(fleet) as url:
        socket = await dial(url)
        await socket.send(hello())
        await receive(socket)
        stream = fleet.dispatch(request(1))
        header = b"\x82\xff" + (wire.MAX_FRAME_BYTES + 1).to_bytes(8, "big") + bytes(4)
        socket.transport.write(header)  # only the header: nothing of the body is waited for
        async with asyncio.timeout(WAIT_S):
            end = (await stream.next())[0].end
        assert isinstance(end, wire.Failed)
        assert "1009" in end.message
        assert (await close_of(socket))[0] == 1009


@pytest.mark.anyio
async def test_a_flood_of_junk_neither_ends_the_link_nor_starves_the_others() -> None:
    fleet = Fleet(bundles())
    async with serving(fleet) as url, dial(url) as flooder, dial(url) as quiet:
        await flooder.send(hello("flooder", info(model="other")))
        await quiet.send(hello("quiet"))
        assert isinstance(await receive(quiet), wire.Welcome)
        for _ in range(3000):
            await flooder.send(b"\x91\xa7unknown")
        with fleet.dispatch(request(1)) as stream:
            submit = await receive(quiet)
            await quiet.send(wire.encode(wire.Step(0, 1, list(submit.lanes), [1])))
            async with asyncio.timeout(WAIT_S):
                assert (await stream.next())[0].tokens == [1]
        await until(lambda: fleet.skipped_frames == 3000)
        assert {view.state for view in fleet.nodes()} == {"ready"}


@pytest.mark.anyio
async def test_a_cut_socket_fails_its_streams_at_once() -> None:
    fleet = Fleet(bundles())
    async with serving(fleet) as url, dial(url) as socket:
        await socket.send(hello())
        await receive(socket)
        stream = fleet.dispatch(request(1))
        socket.transport.abort()
        async with asyncio.timeout(WAIT_S):
            end = (await stream.next())[0].end
    assert isinstance(end, wire.Failed)
    assert end.code == "node_lost"


@pytest.mark.anyio
async def test_a_silent_node_with_an_open_socket_is_lost() -> None:
    """Pings prove the peer's event loop only: an engine that hangs stops the reports."""
    fleet = Fleet(bundles(), clock=(clock := Clock()))
    async with serving(fleet) as url, dial(url) as socket:
        await socket.send(hello())
        await receive(socket)
        stream = fleet.dispatch(request(1))
        for _ in range(71):
            clock.now += 0.1
            fleet.tick()
        async with asyncio.timeout(WAIT_S):
            end = (await stream.next())[0].end
        assert isinstance(end, wire.Failed)
        assert end.code == "node_lost"
        code, reason = await close_of(socket)
    assert code == 1001
    assert reason.startswith("no report for 7")


@pytest.mark.anyio
async def test_a_peer_that_does_not_read_never_blocks_a_request() -> None:
    fleet = Fleet(bundles())
    async with serving(fleet) as url, dial(url, max_queue=1) as socket:
        await socket.send(hello("n1", info(step_tokens=1 << 24)))  # so that none waits for it
        await receive(socket)
        socket.transport.pause_reading()
        streams = [fleet.dispatch(request(number, tokens=250_000)) for number in range(30)]
        await asyncio.sleep(0.05)
        assert fleet.nodes()[0].queued_bytes > 0  # dispatch returned though nothing can be sent
        for stream in streams:
            stream.abort()
        assert fleet.nodes()[0].queued_bytes < 1000  # what was not sent was taken back
        socket.transport.abort()


@pytest.mark.anyio
async def test_leaving_the_server_cuts_links_and_ends_its_tasks() -> None:
    fleet = Fleet(bundles())
    before = asyncio.all_tasks()
    async with serving(fleet) as url:
        socket = await dial(url)
        await socket.send(hello())
        await receive(socket)
    assert (await close_of(socket))[0] == 1001
    assert fleet.nodes()[0].state == "lost"
    await until(lambda: asyncio.all_tasks() == before)


def test_an_empty_join_token_is_refused() -> None:
    with pytest.raises(ValueError, match="join_token is empty"):
        LinkServer(Fleet(bundles()), join_token="")


# --- bundles --------------------------------------------------------------------------------------


def bundle(size: int = 10) -> bytes:
    return encode_bundle(
        Bundle(
            tokenizer_json=b"x" * size,
            chat_template=None,
            bos_token=None,
            eos_token=None,
            stop_token_ids=(0,),
            add_bos=False,
            context_tokens=128,
            page_size=64,
            vocab_size=10,
        )
    )


def parts(data: bytes, digest: str | None = None) -> list[wire.BundlePart]:
    size = wire.BUNDLE_PART_BYTES
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    digest = digest or bundle_digest(data)
    return [wire.BundlePart(digest, at, len(pieces), piece) for at, piece in enumerate(pieces)]


def as_text(made: Bundle) -> Any:
    return cast(Any, f"text of {len(made.tokenizer_json)} bytes")


@pytest.mark.anyio
async def test_a_bundle_comes_in_parts_and_makes_the_node_ready(tmp_path: Path) -> None:
    data = bundle(2_500_000)
    fleet = Fleet(Bundles(as_text, tmp_path / "bundles"))
    async with serving(fleet) as url, dial(url) as socket:
        await socket.send(hello("n1", info(bundle_digest=bundle_digest(data))))
        welcome = await receive(socket)
        assert welcome.wanted_bundles == (bundle_digest(data),)
        assert fleet.nodes()[0].state == "joining"
        for part in parts(data):
            await socket.send(wire.encode(part))
        await until(lambda: fleet.model("m") is not None)
        assert fleet.nodes()[0].state == "ready"
    assert (tmp_path / "bundles" / bundle_digest(data)).read_bytes() == data
    # The next gateway has it from disk and does not ask.
    fleet = Fleet(Bundles(as_text, tmp_path / "bundles"))
    async with serving(fleet) as url, dial(url) as socket:
        await socket.send(hello("n1", info(bundle_digest=bundle_digest(data))))
        assert (await receive(socket)).wanted_bundles == ()
        await until(lambda: fleet.model("m") is not None)


@pytest.mark.anyio
async def test_a_bundle_that_does_not_load_leaves_the_node_joining_and_says_why() -> None:
    def refuse(made: Bundle) -> Any:
        raise ValueError("not a tokenizer")

    fleet = Fleet(Bundles(refuse))
    digest = bundle_digest(bundle())
    async with serving(fleet) as url, dial(url) as socket:
        await socket.send(hello("n1", info(bundle_digest=digest)))
        await receive(socket)
        await socket.send(wire.encode(parts(bundle())[0]))
        await until(lambda: "not a tokenizer" in fleet.nodes()[0].engines[0].bundle)
        assert fleet.nodes()[0].state == "joining"


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ([wire.BundlePart("d", 1, 2, b"")], "part 1 came, part 0 was due"),
        ([wire.BundlePart("d", 0, 2, b""), wire.BundlePart("d", 0, 2, b"")], "part 1 was due"),
        ([wire.BundlePart("d", 0, 65, b"")], "65 parts announced"),
        ([wire.BundlePart("d", 0, 0, b"")], "0 parts announced"),
        ([wire.BundlePart("d", 0, 2, b""), wire.BundlePart("d", 1, 3, b"")], "3 parts announced"),
        ([wire.BundlePart("d", 0, 1, bytes(wire.BUNDLE_PART_BYTES + 1))], "allowed 1048576"),
        (parts(b"other bytes", "d"), "do not have the digest"),
    ],
)
def test_bundle_parts_are_checked(broken: list[wire.BundlePart], why: str) -> None:
    assembly = Assembly("d")
    for part in broken[:-1]:
        assert assembly.add(part) is None
    with pytest.raises(BundleError, match=why):
        assembly.add(broken[-1])


def test_a_damaged_bundle_on_disk_is_dropped(tmp_path: Path) -> None:
    good, bad = bundle(1), bundle(2)
    (tmp_path / bundle_digest(good)).write_bytes(good)
    (tmp_path / bundle_digest(bad)).write_bytes(bad[:-1])
    (tmp_path / "notes.txt").write_text("not ours")
    made = Bundles(as_text, tmp_path)
    assert made.missing([bundle_digest(bad)]) == (bundle_digest(bad),)
    assert made.missing([bundle_digest(good)]) == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [bundle_digest(good), "notes.txt"]
    )


def test_a_digest_that_is_a_path_is_never_asked_for(tmp_path: Path) -> None:
    fleet = Fleet(Bundles(as_text, tmp_path))
    for digest in ("../../etc/passwd", "", hashlib.sha256().hexdigest().upper()):
        session = fleet.attach(wire.Hello(1, 1, "n", 1, "mixed", (info(bundle_digest=digest),)))
        assert not isinstance(session, wire.Refused)
        assert session.assemblies == {}
        fleet.receive(session, wire.encode(wire.BundlePart(digest, 0, 1, b"")))
        assert session.skipped_frames == 1
    assert list(tmp_path.iterdir()) == []
