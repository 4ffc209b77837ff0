"""`python -m node_agent` as the process it is: signals, exit codes, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policies.contract import wire
from tests.node_agent.conftest import TOKEN, FakeGateway, submit, until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.anyio


class Agent:
    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._out = folder / "stdout"
        self._err = folder / "stderr"

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._out.read_text().splitlines()]

    @property
    def log(self) -> str:
        return self._err.read_text()

    def of(self, event: str) -> list[dict[str, object]]:
        return [line for line in self.lines if line["event"] == event]

    def children(self) -> list[int]:
        file = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in file.read_text().split()]


@contextmanager
def agent(tmp_path: Path, *arguments: str, wrap: tuple[str, ...] = ()) -> Iterator[Agent]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KAGARI_MODELS": str(tmp_path / "models")}
    command = [*(wrap or (sys.executable, "-m", "node_agent")), *arguments]
    with (tmp_path / "stdout").open("wb") as out, (tmp_path / "stderr").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
    started = Agent(process, tmp_path)
    try:
        yield started
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def flags(gateway: FakeGateway, tmp_path: Path, bundle: Path, script: Path) -> tuple[str, ...]:
    return (
        *("--gateway", f"ws://127.0.0.1:{gateway.port}", "--join-token", TOKEN),
        *("--home", str(tmp_path / "home"), "--script", str(script), "--bundle", str(bundle)),
    )


def is_gone(pid: int) -> bool:
    """No process, or a zombie that only its parent keeps."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def test_stages_ready_drain_and_exit_code_0(
    tmp_path: Path, bundle_file: Path, script_file: Path
) -> None:
    async with FakeGateway().listening() as gateway:
        with agent(tmp_path, *flags(gateway, tmp_path, bundle_file, script_file)) as started:
            await gateway.engines()
            await until(lambda: started.of("ready"), "the ready line")
            assert [line["stage"] for line in started.of("stage")] == ["engine"]
            (engine,) = started.children()
            await gateway.send(submit("r", "slow", max_tokens=25))
            await until(lambda: gateway.tokens(0), "a token")
            started.process.send_signal(signal.SIGINT)
            end = await gateway.end(0)
            assert isinstance(end, wire.Finished)
            assert len(gateway.tokens(0)) == 25
            await until(lambda: started.process.poll() is not None, "the exit")
            assert started.process.returncode == 0
            assert is_gone(engine)
            hello = gateway.of(wire.Hello)[0]
            node_id = (tmp_path / "home" / "node-id").read_text().strip()
            assert hello.node_id == node_id
            epoch = int((tmp_path / "home" / "nodes" / node_id / "node-epoch").read_text())
            assert hello.node_epoch == epoch
            for line in started.log.splitlines():
                assert json.loads(line)["level"]


async def test_a_second_signal_ends_it_at_once(
    tmp_path: Path, bundle_file: Path, script_file: Path
) -> None:
    async with FakeGateway().listening() as gateway:
        with agent(tmp_path, *flags(gateway, tmp_path, bundle_file, script_file)) as started:
            await gateway.engines()
            (engine,) = started.children()
            await gateway.send(submit("r", "slow"))
            await until(lambda: gateway.tokens(0), "a token")
            started.process.send_signal(signal.SIGTERM)
            await gateway.first(wire.Draining)
            started.process.send_signal(signal.SIGTERM)
            await until(lambda: started.process.poll() is not None, "the exit")
            assert is_gone(engine)
            assert not any(isinstance(end, wire.Finished) for end in gateway.ends(0))


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "under SIGSTOP"])
async def test_parent_death_leaves_nothing_running(
    tmp_path: Path, bundle_file: Path, script_file: Path, is_stopped: bool
) -> None:
    async with FakeGateway().listening() as gateway:
        with agent(tmp_path, *flags(gateway, tmp_path, bundle_file, script_file)) as started:
            await gateway.engines()
            (engine,) = started.children()
            if is_stopped:
                os.kill(engine, signal.SIGSTOP)
            started.process.kill()
            await until(lambda: is_gone(engine), "the engine's end")


async def test_exit_with_parent(tmp_path: Path, bundle_file: Path, script_file: Path) -> None:
    """Started by a process that dies: the agent and its engine follow."""
    starter = textwrap.dedent(
        """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-m", "node_agent", *sys.argv[1:]])
        print('{"event": "pid", "pid": %d}' % child.pid, flush=True)
        time.sleep(60)
        """
    )
    async with FakeGateway().listening() as gateway:
        arguments = (*flags(gateway, tmp_path, bundle_file, script_file), "--exit-with-parent")
        with agent(tmp_path, *arguments, wrap=(sys.executable, "-c", starter)) as started:
            await gateway.engines()
            pid = started.of("pid")[0]["pid"]
            assert isinstance(pid, int)
            started.process.kill()
            await until(lambda: is_gone(pid), "the agent's end")


async def test_one_agent_for_an_id(tmp_path: Path, bundle_file: Path, script_file: Path) -> None:
    async with FakeGateway().listening() as gateway:
        arguments = (*flags(gateway, tmp_path, bundle_file, script_file), "--node-id", "n1")
        other = tmp_path / "other"
        other.mkdir()
        with agent(tmp_path, *arguments):
            await gateway.first(wire.Hello)
            with agent(other, *arguments) as second:
                await until(lambda: second.process.poll() is not None, "the refusal")
                assert second.process.returncode == 1
                (line,) = second.of("error")
                assert "held by another process" in str(line["error"])


async def test_an_engine_that_cannot_start_is_said_with_its_last_words(
    tmp_path: Path, bundle_file: Path, script_file: Path
) -> None:
    async with FakeGateway().listening() as gateway:
        arguments = flags(gateway, tmp_path, bundle_file, script_file)
        with agent(tmp_path, *arguments, "--kv-device-tokens", "1") as started:
            await until(lambda: started.process.poll() is not None, "the exit")
            assert started.process.returncode == 1
            (line,) = started.of("error")
            assert "--kv-device-tokens" in str(line["error"])


async def test_an_unknown_model_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with agent(
        tmp_path,
        *("--gateway", "ws://127.0.0.1:1", "--join-token", TOKEN, "--home", str(tmp_path)),
        *("--model", "smollm"),
    ) as started:
        await until(lambda: started.process.poll() is not None, "the exit")
        assert started.process.returncode == 1
        (line,) = started.of("error")
        assert "smollm2-135m" in str(line["error"])


# --- models --------------------------------------------------------------------------------------


def models(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "node_agent", "models", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "KAGARI_MODELS": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_models_list_says_what_is_there(tmp_path: Path) -> None:
    done = models("list", "--json", folder=tmp_path)
    rows = json.loads(done.stdout)
    assert [(row["name"], row["present"], row["default"]) for row in rows] == [
        ("smollm2-135m", False, True),
        ("smollm2-135m-32k", False, False),
        ("gemma3-270m", False, False),
    ]
    assert "smollm2-135m-32k" in models("list", folder=tmp_path).stdout


def test_models_spec_is_what_an_engine_reads(tmp_path: Path, bundle_file: Path) -> None:
    import msgspec

    from engine.config import ModelSpec
    from tests.node_agent.test_bundle_build import write_folder

    folder = write_folder(tmp_path)
    done = models("spec", str(folder), folder=tmp_path)
    answer = json.loads(done.stdout)
    spec = msgspec.convert(answer["model_spec"], ModelSpec)
    assert spec.path == str(folder)
    assert Path(answer["bundle_path"]).is_file()


def test_models_errors_have_four_parts_in_text_and_json(tmp_path: Path) -> None:
    plain = models("show", "nothing", folder=tmp_path)
    assert plain.returncode == 1
    assert "remedy" in plain.stderr
    as_json = models("show", "nothing", "--json", folder=tmp_path)
    assert set(json.loads(as_json.stdout)["error"]) == {"field", "found", "allowed", "remedy"}
