"""From a model's name to what an engine is told: checkpoint on disk, bundle, ModelSpec."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import msgspec

from engine.config import ModelSpec
from node_agent.bundle import load_bundle
from node_agent.catalogue import (
    Catalogue,
    CatalogueFile,
    CatalogueModel,
    CheckpointFormat,
    nearest,
)
from node_agent.errors import NodeError
from node_agent.gguf import read_gguf
from node_agent.hub import HubName, hub_settings, parse_hub_name
from node_agent.hub_http import HubHttp
from node_agent.hub_pull import (
    Record,
    pull_from_hub,
    read_record,
    record_path,
    repository_folder,
)
from node_agent.pull import PIP_FETCH, Fetch, Progress, pull
from policies.contract.bundle import bundle_digest, decode_bundle, tokenizer_digest

DEFAULT_PAGE_SIZE = 64
SAMPLES = 16  # places of a weights file that go into its fingerprint
SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A hub's name, the folder of models, and what the last pull of that name brought."""

    name: HubName
    folder: Path
    record: Record | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model whose files are known; `entry` and `file` where it is the catalogue's.

    Of a hub's model that was never pulled, path and format are known after `ensure` alone.
    """

    name: str
    path: Path
    format: CheckpointFormat
    entry: CatalogueModel | None = None
    file: CatalogueFile | None = None
    hub: HubPlace | None = None

    @property
    def is_present(self) -> bool:
        return self.hub.record is not None if self.hub else self.path.exists()


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """All that an engine and the gateways need of one model."""

    spec: ModelSpec
    bundle_path: Path
    bundle: bytes  # encoded


def models_folder() -> Path:
    """KAGARI_MODELS, or ~/.cache/kagari/models."""
    chosen = os.environ.get("KAGARI_MODELS")
    return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "kagari" / "models"


def resolve(name: str, catalogue: Catalogue, folder: Path) -> Checkpoint:
    """Finds what a name means, without fetching: catalogue, .gguf file, model folder or hub name.

    Raises NodeError with the nearest names when it means nothing.
    """
    entry = catalogue.find(name)
    if entry is not None:
        file = catalogue.file_of(entry)
        return Checkpoint(entry.name, folder / file.file, file.format, entry, file)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NodeError(
                f"--model {name}",
                found="a folder without config.json",
                allowed="a Hugging Face model folder, a .gguf file or a catalogue name",
                remedy="name the folder that holds config.json, tokenizer.json and *.safetensors",
            )
        return Checkpoint(path.resolve().name, path.resolve(), "safetensors")
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint(path.stem, path.resolve(), "gguf")
    hub_name = parse_hub_name(name)
    is_file_name = ":" not in name and name.endswith(".gguf")
    if hub_name is not None and not is_file_name:
        record = read_record(hub_name, folder)
        return _from_hub(HubPlace(hub_name, folder, record))
    close = nearest(name, catalogue.names())
    pasted = parse_hub_name(name.partition("://")[2].partition("/")[2].strip("/"))
    if pasted is None and not is_file_name:
        pasted = parse_hub_name(name.rstrip("/"))
    if pasted is not None:
        close = [pasted.text]
    raise NodeError(
        f"--model {name}",
        found="no such file" if is_file_name else "no such model",
        allowed="a catalogue name (" + ", ".join(catalogue.names()) + "), a .gguf file, a folder, "
        "or ORG/NAME[@REVISION][:FILE.gguf] of a hub",
        remedy=f"did you mean {' or '.join(close)}?" if close else "run kagari models list",
    )


def _from_hub(place: HubPlace) -> Checkpoint:
    if place.record is None:
        root = repository_folder(place.name, place.folder)
        return Checkpoint(place.name.text, root, "safetensors", hub=place)
    path = record_path(place.name, place.folder, place.record)
    return Checkpoint(place.name.text, path, place.record.format, hub=place)


def ensure(
    checkpoint: Checkpoint, *, fetch: Fetch | None = None, progress: Progress = lambda *_: None
) -> Checkpoint:
    """Pulls what is absent. What is present is trusted by size: the pull verified it."""
    if checkpoint.hub is not None:
        present = checkpoint.hub.record is not None
        return checkpoint if present else pull_hub(checkpoint.hub, progress=progress, refresh=False)
    if checkpoint.file is None:
        return checkpoint
    file = checkpoint.file
    if checkpoint.path.exists():
        size = checkpoint.path.stat().st_size
        if size != file.file_bytes:
            raise NodeError(
                f"checkpoint {checkpoint.path.name}",
                found=f"{size} bytes",
                allowed=f"{file.file_bytes} bytes",
                remedy=f"remove {checkpoint.path} and start again",
            )
        return checkpoint
    pull(file, checkpoint.path.parent, fetch=fetch or PIP_FETCH, progress=progress)
    return checkpoint


def pull_hub(place: HubPlace, *, progress: Progress, refresh: bool) -> Checkpoint:
    """refresh: ask the hub what the revision means now. Raises NodeError."""
    http = open_hub(place.name)
    try:
        record = pull_from_hub(
            place.name, place.folder, http=http, progress=progress, refresh=refresh
        )
    finally:
        http.close()
    return _from_hub(replace(place, record=record))


def open_hub(name: HubName) -> HubHttp:
    settings = hub_settings()
    if settings.is_offline:
        raise NodeError(
            f"--model {name.text}",
            found="HF_HUB_OFFLINE is set, and the model is not here whole",
            allowed="a model that was pulled before",
            remedy="unset HF_HUB_OFFLINE and run kagari models pull once",
        )
    return HubHttp(settings)


def prepare(checkpoint: Checkpoint, *, bundle_caches: tuple[Path, ...]) -> PreparedModel:
    """Builds or finds the bundle and states the ModelSpec. Reads headers, never all weights.

    bundle_caches are tried in order: a models folder may be read-only.
    """
    entry = checkpoint.entry
    page_size = entry.page_size if entry else DEFAULT_PAGE_SIZE
    labels = entry.labels if entry else ()
    fingerprint = fingerprint_of(checkpoint)
    refusal: NodeError | None = None
    for cache in bundle_caches:
        try:
            bundle_path, encoded = load_bundle(
                checkpoint.path,
                cache,
                source_digest=_text_digest(checkpoint),
                context_tokens=entry.context_tokens if entry else None,
                page_size=page_size,
                labels=labels,
                chat_template=entry.chat_template() if entry else None,
            )
            break
        except NodeError as error:
            refusal = error
    else:
        assert refusal is not None, "bundle_caches is never empty"
        raise refusal
    rope = entry.rope_scaling if entry else None
    recipe = msgspec.json.encode((checkpoint.name, fingerprint, rope))
    spec = ModelSpec(
        name=checkpoint.name,
        identity=f"{checkpoint.name}@{sha256(recipe).hexdigest()[:16]}",
        path=str(checkpoint.path),
        format=checkpoint.format,
        rope_scaling=rope,
        context_tokens=entry.context_tokens if entry else None,
        page_size=page_size,
        tokenizer_digest=tokenizer_digest(decode_bundle(encoded).tokenizer_json),
        bundle_digest=bundle_digest(encoded),
        aliases=entry.aliases if entry else (),
        labels=labels,
    )
    return PreparedModel(spec, bundle_path, encoded)


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """Names the weights: the pulled file's SHA-256, else sizes, headers and samples of all files.

    Two fine-tunes of one model have equal headers and sizes; the samples tell them apart, so that
    they never share pages.
    """
    if checkpoint.file is not None:
        return checkpoint.file.file_sha256
    path = checkpoint.path
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    digest = sha256()
    if path.is_dir():
        digest.update((path / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size}:".encode())
        with file.open("rb") as source:
            for sample in range(SAMPLES):
                source.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(source.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _text_digest(checkpoint: Checkpoint) -> str:
    """Names all that the bundle is made of."""
    if checkpoint.format == "gguf":
        return read_gguf(checkpoint.path).digest
    digest = sha256()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        file = checkpoint.path / name
        content = file.read_bytes() if file.is_file() else b""
        digest.update(f"{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()
