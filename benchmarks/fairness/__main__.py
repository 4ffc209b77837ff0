"""How long a modest tenant waits for its first token while a greedy one floods the engine.

`python -m benchmarks.fairness [--quick] [--only long|short] [--json FILE] [--model NAME]`. One real
engine behind a real gateway, asked the same each way: by the modest tenant alone; beside a flood
of another's, in turns; beside it without the gateway's queue, so that the engine has all of it and
orders it (shortest first, with ageing); and beside a flood of its own tenant's. The answers must be
the same all times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.beside import Beside, compared
from benchmarks.children import children, cpu_s, end_with_parent, leave_by_exit_on_terminate, stop
from benchmarks.engine.machine import Neighbours
from benchmarks.fairness.load import Flood, Played, play
from benchmarks.gateway.processes import TOKEN, Gateway, gateway
from benchmarks.gateway.rows import percentile
from gateway.cli.client import Server, call

FLOODS = {"long": Flood(num_prompts=4, tokens=1500), "short": Flood(num_prompts=16, tokens=300)}
OURS, OPEN, OWN = "turns", "no queue", "one tenant"
PERCENTILES = {"p50": 0.5, "p90": 0.9}
SEED = 20261201
START_S = 120.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="20 s each way instead of 90")
    parser.add_argument("--only", choices=sorted(FLOODS), help="of the two floods")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue")
    options = parser.parse_args(arguments)
    leave_by_exit_on_terminate()
    measured = Measured(options.model, 20.0 if options.quick else 90.0)
    floods = [options.only] if options.only else list(FLOODS)
    with served(options.model, "gateway") as site:
        alone = measured.play(site, "alone", None)
        in_turns = {name: measured.play(site, OURS, name) for name in floods}
        own = {name: measured.play(site, OWN, name) for name in floods}
    with served(options.model, "benchmarks.fairness.open_gateway") as site:
        at_once = {name: measured.play(site, OPEN, name) for name in floods}
    rows = [
        row
        for name in floods
        for row in compare(name, alone, in_turns[name], {OPEN: at_once[name], OWN: own[name]})
    ]
    for row in rows:
        print(row, flush=True)
    if options.json is not None:
        told = [json_row for row in rows for json_row in row.rows()]
        options.json.write_text(json.dumps(told, indent=1))
    return 0


def compare(name: str, alone: Played, ours: Played, others: dict[str, Played]) -> Iterator[Beside]:
    """name: of the flood."""
    detail = f"{FLOODS[name]}, {len(ours.ttft_s)} modest requests"
    for told, share in PERCENTILES.items():
        waits = {way: percentile(one.ttft_s, share) for way, one in others.items()}
        first_s, alone_s = percentile(ours.ttft_s, share), percentile(alone.ttft_s, share)
        row = f"{name}_ttft_{told}"
        yield compared(row, first_s, waits, "s", more_is_better=False, detail=detail)
        yield compared(
            f"{row}_alone", first_s, {"alone": alone_s}, "s", more_is_better=False, detail=detail
        )
    yield compared(
        f"{name}_greedy",
        ours.greedy_tokens_per_s,
        {OPEN: others[OPEN].greedy_tokens_per_s},
        "prompt tokens/s",
        more_is_better=True,
        detail=detail,
    )


@dataclass(frozen=True, slots=True)
class Site:
    gateway: Gateway
    operator: Server
    neighbours: Neighbours

    def tenant(self, name: str) -> Server:
        """A new one, so that nothing is found of what others asked."""
        made = call(self.operator, "POST", "/admin/v1/keys", {"name": name, "tenant": name})
        return Server(self.gateway.url, made["secret"])


@dataclass
class Measured:
    model: str
    seconds: float
    texts: list[str] = field(default_factory=list)

    def play(self, site: Site, way: str, flood: str | None) -> Played:
        """Raises AssertionError where an answer differs from that of another way."""
        modest = site.tenant(f"modest {way} {flood}")
        greedy = modest if way == OWN else site.tenant(f"greedy {way} {flood}")
        site.neighbours.cores()
        played = play(
            self.model,
            modest,
            seconds=self.seconds,
            seed=SEED,
            flood=FLOODS[flood] if flood else None,
            greedy=greedy,
        )
        self.texts = self.texts or played.texts
        assert played.texts == self.texts, f"{way}, {flood}: the flood changed an answer"
        say(
            f"{way}, {flood or 'no'} flood: first token p50 {percentile(played.ttft_s, 0.5):.3f}, "
            f"p90 {percentile(played.ttft_s, 0.9):.3f} s; flood "
            f"{played.greedy_tokens_per_s:,.0f} tokens/s; neighbours had "
            f"{site.neighbours.cores():.1f} cores"
        )
        return played


@contextmanager
def served(model: str, module: str) -> Iterator[Site]:
    """One node behind a gateway: what `python -m` is given for that."""
    with tempfile.TemporaryDirectory(prefix="kagari-fairness-") as name:
        folder = Path(name)
        with gateway(folder, module=(module,)) as at, node(folder, at.link_url, model) as agent:
            at.wait_for_model(START_S)
            token = (at.home / "admin.token").read_text().strip()
            pids = [os.getpid(), at.process.pid, agent.pid, *children(agent.pid)]
            yield Site(at, Server(at.admin_url, token), Neighbours(lambda: sum(map(cpu_s, pids))))


@contextmanager
def node(folder: Path, link_url: str, model: str) -> Iterator[subprocess.Popen[bytes]]:
    token_file = folder / "join.token"
    token_file.write_text(TOKEN)
    command = [sys.executable, "-m", "node_agent", "--gateway", link_url, "--node-id", "n1"]
    command += ["--join-token-file", str(token_file), "--home", str(folder / "node")]
    command += ["--model", model, "--kv-host-mb", "0", "--kv-disk-mb", "0"]
    with (folder / "node.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
        )
        try:
            yield process
        finally:
            stop(process, 15)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
