"""The messages on a link between a node and a gateway, and on the socket between agent and engine.

One frame is one msgpack-encoded message. All structs are array-like: fields are positional, so the
only legal change is to append a field with a default; an old reader skips what it does not know.
A reader that meets an unknown tag counts the frame and skips it; it never drops the link.
Token ids travel as u32 little endian bytes, which is also the layout that page keys hash.
"""

from __future__ import annotations

import sys
from array import array
from typing import Literal

import msgspec
from msgspec import Struct

WIRE_VERSION = 4
# 2: Sampling from presence_penalty on, Logprobs, PromptLogprobs
# 3: tiers in reports and usages; Pin, Unpin, Purge
# 4: Transfer in Submit, engines' peer addresses, SetRole
TIERS_VERSION = 3
SPLIT_VERSION = 4
MIN_WIRE_VERSION = 1
BUNDLE_PART_BYTES = 1 << 20
MAX_FRAME_BYTES = 16 << 20
MAX_LANES = 128  # of one Submit
LARGEST_PENALTY = 1e4  # either way, and of a bias: logits stay finite in fp32

Compute = Literal["exact", "fast"]  # exact: a row's result is its own; fast: it need not be
Role = Literal["mixed", "prefill", "decode"]
Tier = Literal["device", "host", "disk", "cluster"]
NodeState = Literal["joining", "ready", "suspect", "draining", "lost"]
EngineState = Literal["loading", "ready", "down"]
FinishReason = Literal["stop", "length", "abort", "error"]


def pack_ids(ids: array[int]) -> bytes:
    """Token ids (array of typecode 'I') as u32 little endian bytes."""
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """u32 little endian bytes as an array of typecode 'I'; raises ValueError on a torn tail."""
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


# --- values -------------------------------------------------------------------------------------


class Sampling(Struct, frozen=True, array_like=True, omit_defaults=False):
    """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 mean no cut."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0  # subtracted once from each token of the completion so far
    frequency_penalty: float = 0.0  # subtracted for each time it occurs there
    repetition_penalty: float = 1.0  # divides (or multiplies) tokens of prompt and completion
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added), ids ascending
    logprobs: int | None = None  # alternatives beside the chosen token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt; the first lane tells them

    @property
    def least_version(self) -> int:
        """Of a reader that obeys all of it: an older one would skip fields and say nothing."""
        is_plain = (
            self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and self.logprobs is None
            and self.prompt_logprobs is None
        )
        return 1 if is_plain else 2


class Usage(Struct, frozen=True, array_like=True):
    """Tokens of one stream. prompt_tokens includes cached_tokens, and these what was fetched from
    slower tiers; the others were on the device."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    cluster_tokens: int = 0


class TierReport(Struct, frozen=True, array_like=True):
    """A slower tier of an engine. Counts since the engine's start; a state other than ok means that
    nothing is asked of it for now."""

    tier: Tier
    pages_total: int  # 0: unknown
    pages_used: int
    state: Literal["ok", "scanning", "broken"] = "ok"
    hit_pages: int = 0
    miss_pages: int = 0
    stored_pages: int = 0
    evicted_pages: int = 0
    dropped_pages: int = 0  # not stored: the queue was full, or the tier refused
    corrupt_pages: int = 0
    timeouts: int = 0
    fetch_bytes_per_s: float = 0.0  # measured; 0 until it was


class EngineInfo(Struct, frozen=True, array_like=True):
    """What one engine of a node serves; constant while the engine lives."""

    engine: int  # index on this node
    model: str  # the served name
    identity: str  # interchangeable model id: equal ids may share pages
    context_tokens: int
    page_size: int
    num_pages: int
    bundle_digest: str  # hex SHA-256 of the encoded tokenizer bundle
    tokenizer_digest: str  # hex SHA-256 of tokenizer.json: part of the page-key seed
    layout_id: str  # what the bytes of a page mean
    weights_digest: str
    weights_precision: str  # e.g. "bf16", "q4_1"
    kv_precision: str  # e.g. "bf16"
    compute: str  # a Compute
    step_tokens: int  # token budget of one step
    prefill_tokens_per_s: float = 0.0  # measured at start-up; reports carry the running value
    aliases: tuple[str, ...] = ()
    owned_by: str = "kagari"
    page_bytes: int = 0
    tier_pages: tuple[tuple[Tier, int], ...] = ()  # capacity of each slower tier
    # Of a host tier that engines of one machine share: equal ids, one memory. "": its own.
    host_arena: str = ""
    peer: str = ""  # where other engines bring pages, "host:port"; "": nowhere, it takes no part


class EngineReport(Struct, frozen=True, array_like=True):
    """An engine's load, from the engine's own loop. Pages: free + held + cached = total."""

    engine: int
    state: EngineState
    step: int = 0
    step_age_s: float = 0.0  # since the loop last advanced or said it was idle
    waiting_sequences: int = 0
    running_sequences: int = 0
    uncached_tokens: int = 0  # prompt tokens still to be computed, waiting and running
    pages_total: int = 0
    pages_free: int = 0
    pages_held: int = 0  # in use by a sequence, a step or a transfer
    pages_cached: int = 0  # in the prefix cache and held by nothing else
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    preemptions: int = 0
    rss_bytes: int = 0
    tiers: tuple[TierReport, ...] = ()
    pages_pinned: int = 0
    integrity_faults: int = 0
    import_bytes_per_s: float = 0.0  # of pages that peers brought, measured; 0 until it was


class PageStored(Struct, frozen=True, array_like=True, tag="stored"):
    page_key: bytes  # first 16 bytes of the key
    tier: Tier = "device"


class PageRemoved(Struct, frozen=True, array_like=True, tag="removed"):
    page_key: bytes
    tier: Tier = "device"


class CacheCleared(Struct, frozen=True, array_like=True, tag="cleared"):
    tier: Tier = "device"


PageEvent = PageStored | PageRemoved | CacheCleared


# --- rare things inside a Step ------------------------------------------------------------------


class Started(Struct, frozen=True, array_like=True, tag="started"):
    """Sent once a stream, in or before the frame of its first token. tier: the slowest that the hit
    came from. The split is as in Usage; all zeros from a node that cannot tell it."""

    lane: int
    cached_tokens: int
    queue_s: float = 0.0
    tier: str = "device"
    host_tokens: int = 0
    disk_tokens: int = 0
    cluster_tokens: int = 0


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """Terminal: the stream's tokens in this frame come first, then this."""

    lane: int
    reason: FinishReason
    usage: Usage


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """Terminal: the stream ended by a fault of ours (code is a name from docs/errors.md)."""

    lane: int
    code: str
    message: str
    usage: Usage = Usage()


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural log probabilities under the model's own distribution: before temperature, penalties,
    bias and cuts. top: (token id, logprob) of the likeliest, best first; the token may be there."""

    logprob: float
    rank: int  # 1 for the likeliest
    top: tuple[tuple[int, float], ...] = ()


class Logprobs(Struct, frozen=True, array_like=True, tag="logprobs"):
    """Of all tokens that this lane got in this frame, in their order."""

    lane: int
    entries: tuple[TokenLogprob, ...]


class PromptLogprobs(Struct, frozen=True, array_like=True, tag="prompt_logprobs"):
    """Of prompt tokens [start, start + len(entries)), in order over frames, before the first
    token. The first token of a prompt has none, so start is 1 at first."""

    lane: int
    start: int
    entries: tuple[TokenLogprob, ...]


Rare = Started | Finished | Failed | Logprobs | PromptLogprobs


# --- node → gateway -----------------------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first frame of a node. The join token is in the handshake's Authorization header."""

    version: int
    min_version: int
    node_id: str
    node_epoch: int  # grows at every node start; stale messages are ignored
    role: Role
    engines: tuple[EngineInfo, ...]
    software: str = ""
    bundles: tuple[str, ...] = ()  # digests of models still to come: their text loads meanwhile


class BundlePart(Struct, frozen=True, array_like=True, tag="bundle_part"):
    digest: str
    index: int
    count: int
    data: bytes  # at most BUNDLE_PART_BYTES


class Step(Struct, array_like=True, tag="step"):
    """One engine step's tokens for this link: lanes[i] got tokens[i]; a lane may repeat.

    computed: (lane, tokens of its prompt that are computed by now, cached ones too), of the prompts
    that this step went on with and did not complete.
    """

    engine: int
    step: int
    lanes: list[int]
    tokens: list[int]
    rare: list[Rare] = []
    computed: list[tuple[int, int]] = []


class PageEvents(Struct, frozen=True, array_like=True, tag="page_events"):
    """Events numbered from `first` on. A gap means loss: the gateway answers with Resync.

    With snapshot=True the events begin with CacheCleared and are the whole truth so far.
    """

    engine: int
    first: int
    events: list[PageEvent]
    snapshot: bool = False


class Report(Struct, frozen=True, array_like=True, tag="report"):
    """Each second; its engines tuple replaces the earlier one (a restarted engine has new info)."""

    node_epoch: int
    sequence: int
    state: NodeState
    engines: tuple[EngineReport, ...]
    backlog_uncached_tokens: int = 0  # over all gateways
    role: Role | None = None  # as it is now; None: as Hello said


class EnginesChanged(Struct, frozen=True, array_like=True, tag="engines_changed"):
    """An engine came up, restarted or went: the full list, replacing Hello's."""

    engines: tuple[EngineInfo, ...]


class UsageRecord(Struct, frozen=True, array_like=True, tag="usage_record"):
    """The final usage of a stream, resent after a reconnect until acknowledged; ledger only."""

    request_id: str
    attempt: int
    lane: int
    reason: FinishReason
    usage: Usage


class PinResult(Struct, frozen=True, array_like=True, tag="pin_result"):
    """What became of a Pin: its pages are computed and held, or a code of docs/errors.md."""

    engine: int
    pin_id: str
    pages: int
    code: str = ""
    message: str = ""


class PurgeResult(Struct, frozen=True, array_like=True, tag="purge_result"):
    """A tenant's pages are gone from the tiers named; `left` names those that did not answer."""

    engine: int
    purge_id: str
    pages: int
    left: tuple[Tier, ...] = ()


class Draining(Struct, frozen=True, array_like=True, tag="draining"):
    """The node takes nothing new and finishes what runs."""

    reason: str = ""


# --- gateway → node -----------------------------------------------------------------------------


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    version: int
    gateway_id: str
    wanted_bundles: tuple[str, ...] = ()  # digests the gateway does not hold


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """Instead of Welcome; the link is closed after it. The node retries with backoff."""

    code: str
    message: str


class Transfer(Struct, frozen=True, array_like=True):
    """How a prompt that one engine computes reaches the one that decodes it. Made by the gateway,
    new for each attempt; both get the same ids and secrets, each with the other's address.

    peer: to prefill, where decode listens; to decode, where prefill does. Prefill connects. Under
    the second id decode brings back what it computed, by connecting to prefill; an empty one: not.
    """

    transfer_id: bytes  # 16
    secret: bytes  # 32, for this transfer alone
    peer: str
    return_id: bytes = b""  # 16, or empty
    return_secret: bytes = b""


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """One request's streams, one a lane. Idempotent by (request_id, attempt).

    The lanes share the prompt's pages and differ by their noise: lane i draws with seed + i.
    """

    request_id: str
    attempt: int
    engine: int
    lanes: tuple[int, ...]
    prompt: bytes  # u32 little endian ids
    salt: bytes  # 32 bytes
    sampling: Sampling
    deadline_s: float  # from receipt; the engine aborts what is later
    role: Role = "mixed"
    grammar: str | None = None
    transfer: bytes | None = None  # an encoded Transfer, if role is not mixed
    retention_s: float | None = None


class Pin(Struct, frozen=True, array_like=True, tag="pin"):
    """Compute this prompt's full pages and keep them on the device until ttl_s is over or Unpin.

    Idempotent by pin_id. max_pages is the tenant's quota on this engine, of all its pins.
    """

    engine: int
    pin_id: str
    prompt: bytes  # u32 little endian ids
    salt: bytes
    ttl_s: float
    max_pages: int


class Unpin(Struct, frozen=True, array_like=True, tag="unpin"):
    engine: int
    pin_id: str


class Purge(Struct, frozen=True, array_like=True, tag="purge"):
    """Forget a tenant: its pages leave every tier, its running sequences publish nothing more."""

    engine: int
    purge_id: str
    salt: bytes


class Abort(Struct, frozen=True, array_like=True, tag="abort"):
    lanes: tuple[int, ...]


class FinishLane(Struct, frozen=True, array_like=True, tag="finish_lane"):
    """A stop string matched: end the stream, bill `keep` completion tokens."""

    lane: int
    keep: int


class Resync(Struct, frozen=True, array_like=True, tag="resync"):
    engine: int


class UsageAck(Struct, frozen=True, array_like=True, tag="usage_ack"):
    records: tuple[tuple[str, int], ...]  # (request_id, attempt)
    lanes: tuple[int, ...] = ()  # of each record: which of the request's streams is meant


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """The operator wants this node to take nothing new (True) or to serve again (False)."""

    drain: bool = True


class SetRole(Struct, frozen=True, array_like=True, tag="set_role"):
    """Serve as this from now on; what runs ends as it began. Told back in the next Report."""

    role: Role


# --- engine → agent only ------------------------------------------------------------------------


class EngineUp(Struct, frozen=True, array_like=True, tag="engine_up"):
    info: EngineInfo
    load_s: float


class EngineNews(Struct, frozen=True, array_like=True, tag="engine_news"):
    """Each second, and at once when idle after work: load, page events and final usages."""

    report: EngineReport
    first_event: int
    events: list[PageEvent]


NodeToGateway = (
    Hello
    | BundlePart
    | Step
    | PageEvents
    | Report
    | EnginesChanged
    | UsageRecord
    | PinResult
    | PurgeResult
    | Draining
)
GatewayToNode = (
    Welcome
    | Refused
    | Submit
    | Abort
    | FinishLane
    | Resync
    | UsageAck
    | Pin
    | Unpin
    | Purge
    | Drain
    | SetRole
)
EngineToAgent = EngineUp | EngineNews | UsageRecord | PinResult | PurgeResult
AgentToEngine = Submit | Abort | FinishLane | Pin | Unpin | Purge | Drain

encode = msgspec.msgpack.Encoder().encode
decode_from_node = msgspec.msgpack.Decoder(NodeToGateway).decode
decode_from_gateway = msgspec.msgpack.Decoder(GatewayToNode).decode
decode_from_engine = msgspec.msgpack.Decoder(EngineToAgent).decode
decode_transfer = msgspec.msgpack.Decoder(Transfer).decode
decode_from_agent = msgspec.msgpack.Decoder(AgentToEngine).decode
