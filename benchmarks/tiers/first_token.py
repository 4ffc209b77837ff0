"""How soon the first token comes with the prefix on the device, in a slower tier, or nowhere."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.beside import Beside, compared
from benchmarks.mooncake import own_store
from benchmarks.tiers.one_engine import ROOT, Answer, OneEngine
from policies.contract.wire import Drain

_PAGE_TOKENS = 64
_TAIL_TOKENS = 20  # of the prompt behind the prefix: what a turn adds
_MARGIN_PAGES = 4
_STORE_PORT = 21091
_SEGMENT_MB = 512


def model_spec(name: str) -> dict[str, object]:
    """Raises CalledProcessError where the model was not pulled."""
    command = [sys.executable, "-m", "node_agent", "models", "spec", name, "--json"]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    spec: dict[str, object] = json.loads(told)["model_spec"]
    return spec


def prompt(tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000, 9000) for _ in range(tokens + _TAIL_TOKENS)]


class Measured:
    """Seconds by tier. A warm answer must be the cold one's, and from where it is said to be."""

    def __init__(self, tokens: int) -> None:
        self.num_pages = tokens // _PAGE_TOKENS
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._cold: dict[int, list[int]] = {}

    def add(self, tier: str, seed: int, answer: Answer) -> None:
        if tier == "cold":
            assert answer.usage.cached_tokens == 0, answer.usage
            self._cold[seed] = answer.tokens
        else:
            most = self.num_pages * _PAGE_TOKENS
            assert answer.usage.cached_tokens == most, (tier, answer.usage)
            assert answer.started.tier == tier, (tier, answer.started)
            assert answer.tokens == self._cold[seed], f"{tier}: other tokens than cold"
        self.seconds[tier].append(answer.ttft_s)
        print(f"  {tier:8} {answer.ttft_s:.4f} s", file=sys.stderr, flush=True)


def first_token_rows(
    name: str, tokens: int, *, rounds: int, absent: dict[str, str]
) -> list[Beside]:
    """absent: takes the reason where a tier cannot be measured here."""
    spec = model_spec(name)
    measured = Measured(tokens)
    pages = measured.num_pages
    # Room for two prompts: the third pushes the first one out.
    device = ("--kv-device-tokens", str(2 * (pages + _MARGIN_PAGES) * _PAGE_TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            disk = ("--kv-disk-mb", "1024", "--kv-disk-dir", str(Path(folder) / str(turn)))
            first = 10 * turn
            with OneEngine(spec, *device, *disk, "--kv-host-mb", "1024") as engine:
                for seed in (first, first + 1, first + 2):
                    measured.add("cold", seed, engine.ask(prompt(tokens, seed)))
                engine.tiers(lambda tiers: tiers["host"].stored_pages >= 3 * pages)
                measured.add("host", first, engine.ask(prompt(tokens, first)))
                measured.add("device", first, engine.ask(prompt(tokens, first)))
                engine.send(Drain())
                engine.tiers(lambda tiers: tiers["disk"].pages_used >= 3 * pages)
                engine.kill()
            with OneEngine(spec, *device, *disk) as engine:
                for seed in (first, first + 1):
                    measured.add("disk", seed, engine.ask(prompt(tokens, seed)))
            try:
                with own_store(port=_STORE_PORT, segment_mb=_SEGMENT_MB) as url:
                    _measure_cluster(spec, (*device, "--cluster-store", url), measured, first)
            except PermissionError as error:
                absent["ttft_cluster"] = f"{error}: run it as root"
    cold_s = statistics.median(measured.seconds.pop("cold"))
    return [
        compared(
            f"ttft_{tier}",
            statistics.median(found),
            {"cold": cold_s},
            "s",
            more_is_better=False,
            detail=f"{pages * _PAGE_TOKENS} tokens of the prefix, {_TAIL_TOKENS} behind it",
        )
        for tier, found in measured.seconds.items()
    ]


def _measure_cluster(
    spec: dict[str, object], flags: tuple[str, ...], measured: Measured, seed: int
) -> None:
    """One engine computes and puts, another gets while the first, whose memory it is in, lives."""
    tokens = measured.num_pages * _PAGE_TOKENS
    with OneEngine(spec, *flags) as owner:
        measured.add("cold", seed, owner.ask(prompt(tokens, seed)))
        owner.tiers(lambda tiers: tiers["cluster"].stored_pages >= measured.num_pages)
        with OneEngine(spec, *flags) as engine:
            measured.add("cluster", seed, engine.ask(prompt(tokens, seed)))
