"""Engines of one machine as processes with one host tier: what one computed the others need not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.tiers.one_engine import OneEngine
from engine.store.shared_arena import FOLDER
from tests.engine.test_tiers_process import PAGES, model_spec, prompt

HIT = PAGES * 64


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    return (
        *("--kv-device-tokens", "512"),
        *("--kv-host-mb", "64", "--kv-host-share", str(tmp_path)),
    )


def arena_files(arena_id: str) -> list[Path]:
    found = []
    for path in FOLDER.glob("kagari-*"):
        with suppress(OSError), path.open("rb") as file:  # others come and go
            if bytes.fromhex(arena_id) in file.read(256):
                found.append(path)
    return found


def test_pages_of_one_engine_serve_the_other_and_outlive_its_kill(flags: tuple[str, ...]) -> None:
    spec = model_spec("smollm2-135m")
    with OneEngine(spec, *flags) as one, OneEngine(spec, *flags) as two:
        assert one.info.host_arena == two.info.host_arena != ""
        cold = one.ask(prompt(1))
        one.tiers(lambda tiers: tiers["host"].stored_pages >= PAGES)
        warm = two.ask(prompt(1))
        assert (warm.tokens, warm.usage.host_tokens) == (cold.tokens, HIT)
        one.start(prompt(2), max_tokens=200)
        one.kill()
        back = two.ask(prompt(3, num_pages=7))  # the whole pool: prompt 1 leaves the device
        assert back.usage.cached_tokens == 0
        again = two.ask(prompt(1))
        assert (again.tokens, again.usage.host_tokens) == (cold.tokens, HIT)
        with OneEngine(spec, *flags) as three:
            found = three.ask(prompt(1))
            assert (found.tokens, found.usage.host_tokens) == (cold.tokens, HIT)
        assert len(arena_files(two.info.host_arena)) == 1
    assert arena_files(two.info.host_arena) == [], "the last to leave removes it"


def test_an_engine_that_cannot_share_keeps_a_memory_of_its_own(flags: tuple[str, ...]) -> None:
    spec = model_spec("smollm2-135m")
    with OneEngine(spec, *flags) as one:
        (arena,) = arena_files(one.info.host_arena)
        arena.with_suffix(".lock").chmod(0o644)  # as if it were somebody else's
        with OneEngine(spec, *flags) as two:
            assert (one.info.host_arena != "", two.info.host_arena) == (True, "")
            cold = two.ask(prompt(1))
            two.tiers(lambda tiers: tiers["host"].stored_pages >= PAGES)
            two.ask(prompt(3, num_pages=7))
            back = two.ask(prompt(1))
            assert (back.tokens, back.usage.host_tokens) == (cold.tokens, HIT)
            said = two.close()
    assert "engine_host_tier_not_shared" in said
