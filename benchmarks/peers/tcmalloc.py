"""The allocator that vLLM asks to be preloaded: the system's, or Debian's unpacked beside vLLM."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "libtcmalloc-minimal4"
REMEDY = f"apt-get install {PACKAGE}"
LIMIT_S = 120.0


def find(home: Path, system: Path = Path("/usr/lib")) -> Path | None:
    """home: a peer's environment."""
    for folder in (system, home / "debian/usr/lib"):
        if found := sorted(folder.glob("*/libtcmalloc_minimal.so.4")):
            return found[0]
    return None


def bring(
    home: Path,
    *,
    system: Path = Path("/usr/lib"),
    run: Callable[..., object] = subprocess.run,
    which: Callable[[str], str | None] = shutil.which,
) -> str | None:
    """Unpacks Debian's package into a peer's environment, no root needed; why not, if it cannot."""
    if find(home, system):
        return None
    for tool in ("apt-get", "dpkg-deb"):
        if which(tool) is None:
            return f"tcmalloc is absent and there is no {tool}; install {PACKAGE}'s like by hand"
    with tempfile.TemporaryDirectory(dir=home) as folder:
        try:
            run(
                ["apt-get", "-qq", "download", PACKAGE],
                cwd=folder,
                capture_output=True,
                check=True,
                timeout=LIMIT_S,
            )
            (package,) = Path(folder).glob(f"{PACKAGE}_*.deb")
            run(["dpkg-deb", "-x", str(package), str(home / "debian")], check=True, timeout=LIMIT_S)
        except (subprocess.SubprocessError, OSError, ValueError):
            return f"tcmalloc is absent and not downloaded: {REMEDY}"
    return None if find(home, system) else f"{PACKAGE} holds no tcmalloc: {REMEDY}"
