"""One file of a fixed size for one process alone, read and written around the page cache if it can.

Direct I/O wants offsets, lengths and memory in multiples of BLOCK; not every file system has it. A
file that is allocated whole at the start cannot run out of disk later.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.config import ConfigError

BLOCK = 4096
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def aligned(size: int) -> memoryview:
    """Zeroed memory that direct I/O takes."""
    return memoryview(mmap.mmap(-1, max(1, size)))


class BlockFile:
    """was_empty: it was not there, or held nothing. why_buffered: what refused direct I/O."""

    def __init__(self, path: Path, size: int, *, direct: bool = True) -> None:
        """Makes the file (mode 0600, its folder 0700), locks it and gives it its size; what it held
        stays. Raises ConfigError if it cannot be made, is in use, or the disk has no room."""
        self.path = path
        self._fd = _open(path)
        try:
            _lock(self._fd, path)
            self.was_empty = _resize(self._fd, path, size)
            self.why_buffered = try_direct(self._fd) if direct else "not asked for"
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def is_direct(self) -> bool:
        return self.why_buffered is None

    def takes(self, view: memoryview) -> bool:
        """It can be read into or written from without a copy."""
        if not self.is_direct:
            return True
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return not (address % BLOCK or len(view) % BLOCK)

    def read(self, offset: int, views: Sequence[memoryview]) -> int:
        """Bytes read: fewer than asked for where the file ends early. Raises OSError."""
        return os.preadv(self._fd, views, offset)

    def write(self, offset: int, views: Sequence[memoryview]) -> int:
        """Bytes written. Raises OSError; what lay there may be gone then."""
        return os.pwritev(self._fd, views, offset)

    def sync(self) -> None:
        """Waits for the disk. Raises OSError, also when another file lies at the path by now."""
        os.fdatasync(self._fd)
        if not os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
            raise FileNotFoundError(errno.ENOENT, "replaced by another file", str(self.path))

    def close(self) -> None:
        os.close(self._fd)


def remove_unused(path: Path) -> None:
    """Remove such a file. Raises OSError, also while a process uses it."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
    except OSError as error:
        raise unusable(path, error) from error
    return fd


def unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "--kv-disk-dir",
        found=f"{path.parent}, where {path.name} cannot be used ({error.strerror})",
        allowed="a folder that this user may write to, on a disk that works",
        remedy="give another --kv-disk-dir, or --kv-disk-mb 0 for no disk tier",
    )


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            "--kv-disk-dir",
            found=f"{path}, which another process uses ({error.strerror})",
            allowed="a folder of its own for every engine",
            remedy="end the other process, or give another --kv-disk-dir",
        ) from error


def _resize(fd: int, path: Path, size: int) -> bool:
    """True: it was empty."""
    before = os.fstat(fd).st_size
    try:
        if before > size:
            os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in FULL:
            raise unusable(path, error) from error
        os.ftruncate(fd, min(before, size))
        if not before:
            path.unlink(missing_ok=True)
        disk = os.statvfs(path.parent)
        free = disk.f_bavail * disk.f_frsize
        raise ConfigError(
            "--kv-disk-mb",
            found=f"{size >> 20} MB for {path} ({error.strerror})",
            allowed=f"what the disk has room for: {free >> 20} MB are free",
            remedy="lower --kv-disk-mb, free some disk, or give another --kv-disk-dir",
        ) from error
    return not before


def try_direct(fd: int) -> str | None:
    """Has fd read and written around the page cache; else why not, and it stays as it was."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(fd, [aligned(BLOCK)], 0)
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return error.strerror or str(error)
    return None
