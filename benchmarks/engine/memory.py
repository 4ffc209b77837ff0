"""Row memory_resident: each process after its load and one long prompt, before any other row."""

from __future__ import annotations

from pathlib import Path

from benchmarks.beside import compared
from benchmarks.engine.bench import SUFFIXES, Bench
from benchmarks.peers.driven import DrivenEngine, PeerLost

NAME, PROMPT = "memory_resident", 2048


def add_row(bench: Bench, model: Path) -> None:
    """It warms everyone up on the way: the row comes first."""
    if not bench.wants(NAME):
        return
    prompt = bench.prompt(PROMPT)

    def ask(engine: DrivenEngine) -> dict[str, float]:
        engine.first_token(prompt)
        return engine.memory()

    ours = {compute: ask(engine) for compute, engine in bench.ours.items()}
    theirs: dict[str, dict[str, float]] = {}
    for name, peer in list(bench.peers.items()):
        try:
            theirs[name] = ask(peer)
        except PeerLost as lost:
            bench.lose(name, lost)
    peaks = ", ".join(
        f"{name} {memory['peak_mb']:.0f} (mapped files {memory['file_mb']:.0f})"
        for name, memory in theirs.items()
    )
    files = [model] if model.is_file() else list(model.glob("*.safetensors"))
    file_mb = sum(file.stat().st_size for file in files) / 1e6
    for compute, memory in ours.items():
        pages_mb = float(bench.ours[compute].call("pages_mb", PROMPT))
        rest = memory["resident_mb"] - file_mb - pages_mb
        detail = (
            f"weights file {file_mb:.0f} MB, its pages {pages_mb:.0f}, rest {rest:.0f}; "
            f"peak {memory['peak_mb']:.0f} (mapped files {memory['file_mb']:.0f})"
        )
        bench.add_row(
            compared(
                f"{NAME}{SUFFIXES[compute]}",
                memory["resident_mb"],
                {name: told["resident_mb"] for name, told in theirs.items()},
                "MB",
                more_is_better=False,
                detail=f"{detail}; peaks: {peaks}" if peaks else detail,
            )
        )
