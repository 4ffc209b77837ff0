"""Files that are whole or absent, and a lock that two processes on one machine agree on."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from node_agent.errors import NodeError


def disk_error(path: Path, error: OSError) -> NodeError:
    """The four parts for a disk that is full, read-only or not ours."""
    return NodeError(
        f"folder {path}",
        found=error.strerror or str(error),
        allowed="a folder that this user may write, with enough free space",
        remedy="free space, or choose another folder with KAGARI_MODELS or --home",
    )


def write_atomically(target: Path, data: bytes) -> None:
    """Readers see the old content or the new, also after a power cut. Raises NodeError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise disk_error(target.parent, error) from error
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise disk_error(target.parent, error) from error
    finally:
        draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Renames inside folder outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(
    path: Path, *, timeout_s: float, waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Holds the lock file; the kernel frees it when the holder dies. Raises NodeError when late.

    waiting is called again and again while another holds it; what it raises ends the wait.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise disk_error(path.parent, error) from error
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_lock(handle):
            waiting()
            if time.monotonic() >= deadline:
                raise NodeError(
                    f"lock {path}",
                    found=f"held by another process for over {timeout_s:.0f} s",
                    allowed="one holder at a time",
                    remedy="stop the other process, or wait until it is done",
                )
            time.sleep(0.1)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
