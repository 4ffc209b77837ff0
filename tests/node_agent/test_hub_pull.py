"""Pulls from a hub on loopback: pinned, verified, resumed; the token stays at home."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from node_agent import checkpoints, hub_pull
from node_agent.app import Stopped
from node_agent.catalogue import load_catalogue
from node_agent.checkpoints import ensure, prepare, resolve
from node_agent.errors import NodeError
from node_agent.hub import HubName, HubSettings, parse_hub_name
from node_agent.hub_http import HubHttp, HubTiming
from node_agent.hub_pull import Record, pull_from_hub, read_record, record_path
from policies.contract.bundle import decode_bundle
from tests.node_agent.hub_server import FakeHub

REPO = "org/tiny"
WEIGHTS = os.urandom(300_000)
CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "vocab_size": 1000,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}" * 2000,
    "tokenizer_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle" * 1000,
    "modeling_evil.py": b"raise SystemExit",
    "README.md": b"# tiny",
}
TAKEN = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
QUICK = HubTiming(connect_s=2, stall_s=5, pause_s=0.01, max_pause_s=0.05, attempts=4)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub().running() as fake:
        fake.add(REPO, FILES)
        yield fake


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For what reads the environment; returns the folder of models."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("KAGARI_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("KAGARI_HOME", str(tmp_path / "home"))
    return tmp_path / "models"


def named(text: str = REPO) -> HubName:
    name = parse_hub_name(text)
    assert name is not None
    return name


def pull(
    hub: FakeHub,
    folder: Path,
    *,
    text: str = REPO,
    token: str | None = None,
    timing: HubTiming = QUICK,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    refresh: bool = True,
    sleep: Callable[[float], None] = lambda _: None,
) -> Record:
    http = HubHttp(HubSettings(hub.url, token), timing, sleep=sleep)
    try:
        return pull_from_hub(named(text), folder, http=http, progress=progress, refresh=refresh)
    finally:
        http.close()


def snapshot(hub: FakeHub, folder: Path) -> Path:
    return folder / "hub" / REPO / hub.heads[REPO]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def expected() -> dict[str, bytes]:
    return {path: FILES[path] for path in TAKEN}


# --- the ordinary way ----------------------------------------------------------------------------


def test_a_pull_brings_the_files_of_a_model_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    record = pull(hub, tmp_path, progress=lambda *row: said.append(row))
    assert content(snapshot(hub, tmp_path)) == expected()
    assert record_path(named(), tmp_path, record) == snapshot(hub, tmp_path) / ""
    assert read_record(named(), tmp_path) == record
    total = sum(len(data) for data in expected().values())
    assert said[-1] == ("download", total, total)
    assert not hub.requests_of("pytorch_model.bin")
    assert not hub.requests_of("modeling_evil.py")


def test_a_second_pull_fetches_no_file_again(hub: FakeHub, tmp_path: Path) -> None:
    pull(hub, tmp_path)
    count = len(hub.requests_of("model.safetensors"))
    pull(hub, tmp_path)
    assert len(hub.requests_of("model.safetensors")) == count


def test_a_named_gguf_and_a_revision_are_taken(hub: FakeHub, tmp_path: Path) -> None:
    ggufs = {"m-Q4_0.gguf": os.urandom(3000), "m-Q8_0.gguf": os.urandom(3000)}
    commit = hub.add("org/g", ggufs)
    hub.add("org/g", {"other.gguf": b"x"})
    text = f"org/g@{commit}:m-Q4_0.gguf"
    record = pull(hub, tmp_path, text=text)
    assert (record.commit, record.format, record.path) == (commit, "gguf", "m-Q4_0.gguf")
    assert record_path(named(text), tmp_path, record).read_bytes() == ggufs["m-Q4_0.gguf"]
    assert read_record(named("org/g"), tmp_path) is None


def test_a_branch_that_moves_cannot_mix_files(hub: FakeHub, tmp_path: Path) -> None:
    """The head moves after the listing: every file is still of the listed commit."""
    first = hub.heads[REPO]
    moved = {**FILES, "model.safetensors": os.urandom(300_000), "config.json": b'{"new": 1}'}

    def move(*_: object) -> None:
        if hub.heads[REPO] == first:
            hub.add(REPO, moved)

    record = pull(hub, tmp_path, progress=move)
    assert record.commit == first
    assert content(tmp_path / "hub" / REPO / first) == expected()
    assert pull(hub, tmp_path, refresh=False).commit == first  # who serves stays with what is here
    assert pull(hub, tmp_path).commit == hub.heads[REPO] != first
    new = content(snapshot(hub, tmp_path))
    assert new["model.safetensors"] == moved["model.safetensors"]


def test_a_list_of_many_pages_is_read_to_its_end(hub: FakeHub, tmp_path: Path) -> None:
    hub.page_size = 2
    pull(hub, tmp_path)
    assert content(snapshot(hub, tmp_path)) == expected()


def test_files_come_side_by_side(hub: FakeHub, tmp_path: Path) -> None:
    shards = {
        f"model-0000{number}-of-00006.safetensors": os.urandom(20_000) for number in range(1, 7)
    }
    texts = {path: FILES[path] for path in ("config.json", "tokenizer.json")}
    hub.add("org/shards", {**texts, **shards, "model.safetensors.index.json": b"{}"})
    hub.bytes_per_s = 100_000
    pull(hub, tmp_path, text="org/shards")
    assert hub.most_at_once >= 2


# --- the token -----------------------------------------------------------------------------------


def test_the_token_is_never_sent_to_another_host(hub: FakeHub, tmp_path: Path) -> None:
    hub.needs_token = "hf_secret"
    pull(hub, tmp_path, token="hf_secret")
    at_hub = [seen for seen in hub.seen if seen.port == hub.api_port]
    at_store = [seen for seen in hub.seen if seen.port == hub.store_port]
    assert at_store
    assert all(seen.headers["authorization"] == "Bearer hf_secret" for seen in at_hub)
    assert not any("secret" in str(seen.headers) for seen in at_store)


def test_the_token_does_not_go_over_an_open_line() -> None:
    sent = HubHttp(HubSettings("http://hub.example", "hf_secret"))._authorization
    assert sent == {}
    assert HubHttp(HubSettings("https://hub.example", "hf_secret"))._authorization != {}


def test_a_refusal_says_how_to_be_let_in_and_not_the_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.needs_token = "hf_right"
    for token, word in ((None, "without"), ("hf_wrong", "with")):
        with pytest.raises(NodeError) as caught:
            pull(hub, tmp_path, token=token)
        assert f"401 {word} a token" in caught.value.found
        assert "licence" in caught.value.remedy
        assert "HF_TOKEN" in caught.value.remedy
        assert "hf_wrong" not in str(caught.value)


# --- faults --------------------------------------------------------------------------------------


def test_a_connection_that_is_cut_is_resumed_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["model.safetensors"] = [("cut", 100_000), ("cut", 0), ("cut", 50_000)]
    pull(hub, tmp_path)
    assert content(snapshot(hub, tmp_path)) == expected()
    store = [s for s in hub.requests_of("model.safetensors") if s.port == hub.store_port]
    ranges = [int(s.headers.get("range", "bytes=0-")[6:-1]) for s in store]
    assert len(ranges) == 4
    assert ranges[0] == 0
    assert ranges == sorted(ranges)
    assert ranges[-1] > 0


def test_a_hub_that_ignores_ranges_starts_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["model.safetensors"] = [("cut", 100_000), ("ignore range", 0)]
    pull(hub, tmp_path)
    assert content(snapshot(hub, tmp_path)) == expected()


def test_a_line_that_is_always_cut_is_given_up(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["model.safetensors"] = [("cut", 0)] * 50
    with pytest.raises(NodeError, match="4 attempts") as caught:
        pull(hub, tmp_path)
    assert "pull again" in caught.value.remedy
    assert read_record(named(), tmp_path) is None


def test_a_drip_counts_as_a_stall(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["model.safetensors"] = [("drip", 1000)]
    timing = HubTiming(connect_s=2, stall_s=0.5, pause_s=0.01, max_pause_s=0.05, attempts=4)
    pull(hub, tmp_path, timing=timing)  # the drip alone would take 50 s
    assert content(snapshot(hub, tmp_path)) == expected()
    assert len(hub.requests_of("model.safetensors")) >= 4  # twice, each at both ports


def test_wrong_bytes_are_removed_and_said(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["model.safetensors"] = [("wrong", 0)]
    with pytest.raises(NodeError, match=r"SHA-256 of model\.safetensors"):
        pull(hub, tmp_path)
    assert not [path for path in content(snapshot(hub, tmp_path)) if "model" in path]
    assert read_record(named(), tmp_path) is None
    pull(hub, tmp_path)
    assert content(snapshot(hub, tmp_path)) == expected()


def test_a_small_file_of_wrong_bytes_is_found_too(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["config.json"] = [("wrong", 0)]
    with pytest.raises(NodeError, match=r"SHA-1 of config\.json"):
        pull(hub, tmp_path)


def test_what_lies_there_longer_than_the_file_is_not_resumed(hub: FakeHub, tmp_path: Path) -> None:
    part = snapshot(hub, tmp_path) / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(400_000))
    pull(hub, tmp_path)
    assert content(snapshot(hub, tmp_path)) == expected()


@pytest.mark.parametrize("where", ["revision", "tree", "model.safetensors"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_asked_again(hub: FakeHub, tmp_path: Path, where: str, status: int) -> None:
    hub.faults[where] = [("status", status)] * 2
    waits: list[float] = []
    patient = HubTiming(connect_s=2, stall_s=5, pause_s=0.01, max_pause_s=60.0, attempts=4)
    timing = QUICK if where == "model.safetensors" else patient  # its threads really wait
    pull(hub, tmp_path, timing=timing, sleep=waits.append)
    assert content(snapshot(hub, tmp_path)) == expected()
    assert waits == ([] if where == "model.safetensors" else [7.0, 7.0])  # as Retry-After says


def test_a_hub_that_stays_busy_is_given_up(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["revision"] = [("status", 429)] * 9
    with pytest.raises(NodeError, match="status 429; 4 attempts"):
        pull(hub, tmp_path)


def test_an_absent_repository_gets_the_nearest_names(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="no such folder here, no such repository") as caught:
        pull(hub, tmp_path, text="org/tinny")
    assert "org/tiny" in caught.value.remedy
    with pytest.raises(NodeError, match="no such repository or revision"):
        pull(hub, tmp_path, text="org/tiny@v9")


def test_no_hub_is_said(tmp_path: Path) -> None:
    http = HubHttp(HubSettings("http://127.0.0.1:9", None), QUICK, sleep=lambda _: None)
    with pytest.raises(NodeError, match="ConnectError") as caught:
        pull_from_hub(named(), tmp_path, http=http)
    assert "HF_ENDPOINT" in caught.value.remedy


def test_a_full_disk_is_said_before_anything_is_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_pull, "SPARE_BYTES", 1 << 60)
    with pytest.raises(NodeError, match="MiB free"):
        pull(hub, tmp_path)
    assert not hub.requests_of("model.safetensors")


# --- a hostile hub -------------------------------------------------------------------------------


def test_a_path_that_leaves_the_folder_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.extra_tree = [{"type": "file", "path": "../../evil.safetensors", "size": 5, "oid": ""}]
    with pytest.raises(NodeError, match="evil"):
        pull(hub, tmp_path)
    assert not list(tmp_path.rglob("evil*"))


def test_a_link_where_a_file_should_be_is_not_followed(hub: FakeHub, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    folder = snapshot(hub, tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to(outside)
    (folder / "tokenizer.json.part").symlink_to(outside)
    with pytest.raises(NodeError):
        pull(hub, tmp_path)
    assert outside.read_bytes() == b"mine"
    (folder / "tokenizer.json.part").unlink()
    pull(hub, tmp_path)
    assert outside.read_bytes() == b"mine"
    assert not (folder / "config.json").is_symlink()


# --- ends in the middle --------------------------------------------------------------------------


def test_a_stop_ends_a_pull_soon_and_the_next_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.bytes_per_s = 200_000

    def stop(stage: str, done: int, total: int) -> None:
        if done > 100_000:
            raise Stopped

    with pytest.raises(Stopped):
        pull(hub, tmp_path, progress=stop)
    hub.bytes_per_s = None
    time.sleep(0.3)  # the thread that was reading ends at its next chunk
    count = len(hub.seen)
    pull(hub, tmp_path)
    assert content(snapshot(hub, tmp_path)) == expected()
    resumed = [seen for seen in hub.seen[count:] if "range" in seen.headers]
    assert resumed


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "node_agent", "models", *words]


def test_a_killed_process_leaves_what_the_next_resumes(hub: FakeHub, environment: Path) -> None:
    hub.bytes_per_s = 150_000
    part = snapshot(hub, environment) / "model.safetensors.part"
    process = subprocess.Popen(command("pull", REPO, "--json"), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 50_000):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert read_record(named(), environment) is None
    had, count = part.stat().st_size, len(hub.seen)
    hub.bytes_per_s = None
    done = subprocess.run(
        command("pull", REPO, "--json"), capture_output=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["present"] is True
    assert content(snapshot(hub, environment)) == expected()
    ranges = {seen.headers.get("range") for seen in hub.seen[count:]}
    assert f"bytes={had}-" in ranges


def test_two_processes_at_once_fetch_each_file_once(hub: FakeHub, environment: Path) -> None:
    hub.bytes_per_s = 1_000_000
    both = [
        subprocess.Popen(
            command("pull", REPO, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    told = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert json.loads(told[0][0])["path"] == json.loads(told[1][0])["path"]
    store = [s for s in hub.requests_of("model.safetensors") if s.port == hub.store_port]
    assert len(store) == 1
    assert len(hub.requests_of("tokenizer_config.json")) == 1


# --- by name -------------------------------------------------------------------------------------


def test_a_whole_copy_needs_no_network(
    hub: FakeHub, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = load_catalogue()
    first = ensure(resolve(REPO, catalogue, environment))
    count = len(hub.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = ensure(resolve(REPO, catalogue, environment))
    assert again == first
    assert again.name == REPO
    assert again.is_present
    assert again.path == snapshot(hub, environment)
    assert len(hub.seen) == count
    (again.path / "config.json").unlink()  # no longer whole
    with pytest.raises(NodeError, match="HF_HUB_OFFLINE"):
        ensure(resolve(REPO, catalogue, environment))


def test_a_pulled_model_is_prepared_under_its_hub_name(
    hub: FakeHub, environment: Path, tmp_path: Path
) -> None:
    letters = {letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": tokenizer.to_str().encode(),
        "generation_config.json": b'{"eos_token_id": [256]}',
        "model.safetensors": WEIGHTS,
    }
    hub.add(REPO, files)
    checkpoint = ensure(resolve(REPO, load_catalogue(), environment))
    prepared = prepare(checkpoint, bundle_caches=(tmp_path / "bundles",))
    assert (prepared.spec.name, prepared.spec.format) == (REPO, "safetensors")
    assert prepared.spec.path == str(snapshot(hub, environment))
    assert prepared.spec.identity.startswith(f"{REPO}@")
    bundle = decode_bundle(prepared.bundle)
    assert (bundle.context_tokens, bundle.stop_token_ids) == (128, (256,))


def test_a_folder_of_that_name_goes_before_the_hub(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "org" / "tiny" / "config.json").write_text("{}")
    assert resolve(REPO, load_catalogue(), environment).hub is None


def test_a_dry_run_says_bytes_and_what_fits_and_fetches_no_weights(
    hub: FakeHub, environment: Path
) -> None:
    done = subprocess.run(
        command("pull", REPO, "--dry-run", "--json"), capture_output=True, timeout=60, check=True
    )
    told = json.loads(done.stdout)
    total = sum(len(data) for data in expected().values())
    assert told["total_bytes"] == told["to_fetch_bytes"] == total
    assert told["commit"] == hub.heads[REPO]
    assert told["fits_on_disk"] is True
    assert told["kv_per_token_bytes"] == 2 * 2 * 2 * 16 * 2
    assert told["kv_tokens_that_fit"] > 0
    assert len(told["files"]) == len(TAKEN)
    assert not hub.requests_of("model.safetensors")
    assert not environment.exists()
    shown = subprocess.run(
        command("pull", REPO, "--dry-run"), capture_output=True, timeout=60, check=True, text=True
    ).stdout
    assert "model.safetensors (293.0 KiB, 300000 bytes)" in shown
    assert "fits_on_disk" in shown


def test_a_pulled_model_is_listed(hub: FakeHub, environment: Path) -> None:
    pull(hub, environment)
    done = subprocess.run(command("list", "--json"), capture_output=True, timeout=60, check=True)
    row = next(row for row in json.loads(done.stdout) if row["name"] == REPO)
    assert row["present"] is True
    assert row["bytes"] == sum(len(data) for data in expected().values())
    assert hub.heads[REPO] in row["source"]


def test_an_error_of_a_pull_has_its_four_parts(hub: FakeHub, environment: Path) -> None:
    done = subprocess.run(
        command("pull", "org/none", "--json"), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert set(json.loads(done.stdout)["error"]) == {"field", "found", "allowed", "remedy"}


def test_a_stop_while_another_pulls_ends_the_wait(
    hub: FakeHub, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.bytes_per_s = 100_000
    first = threading.Thread(target=lambda: pull(hub, environment))
    first.start()
    lock = environment / "hub" / REPO / ".lock"
    while not lock.exists() or not hub.seen:
        time.sleep(0.01)

    def stop(stage: str, *_: int) -> None:
        assert stage == "wait for another pull"
        raise Stopped

    place = resolve(REPO, load_catalogue(), environment).hub
    assert place is not None
    with pytest.raises(Stopped):
        checkpoints.pull_hub(place, progress=stop, refresh=False)
    first.join(30)
    assert read_record(named(), environment) is not None
