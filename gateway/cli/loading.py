"""What an engine says on stderr while it loads, as one line on a terminal; the rest passes on."""

from __future__ import annotations

import json
import sys
import threading
from typing import IO, Any

from rich.console import Console


class LoadingLine:
    """Reads an engine's stderr to its end in a thread of its own; `close` waits for that."""

    def __init__(self, stderr: IO[bytes]) -> None:
        self._stderr = stderr
        console = Console(stderr=True)
        self._status = console.status("starting the engine") if console.is_terminal else None
        if self._status is not None:
            self._status.start()
        self._thread = threading.Thread(target=self._read, name="engine stderr", daemon=True)
        self._thread.start()

    def loaded(self) -> None:
        """The model speaks from here on: nothing of ours on its lines."""
        if self._status is not None:
            self._status.stop()

    def close(self) -> None:
        self.loaded()
        self._thread.join(2)

    def _read(self) -> None:
        with self._stderr:
            for line in self._stderr:
                said = read_loading(line)
                if said is None:
                    sys.stderr.write(line.decode(errors="replace"))
                elif self._status is not None:
                    self._status.update(said)


def read_loading(line: bytes) -> str | None:
    """`weights 45 %` of a line of progress; None when the line is something else."""
    try:
        value: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.get("event") != "engine_loading":
        return None
    share = value.get("share")
    percent = f" {share:.0%}" if isinstance(share, int | float) else ""
    return f"{value.get('stage', 'loading')}{percent}"
