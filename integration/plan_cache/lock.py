"""One process at a time, on one machine or on several that share a file system.

Two parts. ``flock`` on a file: the operating system lets go when its holder ends, however that ends, so processes of
one machine never wait for a dead one. Some shared file systems keep ``flock`` within one machine, and some have none:
so the holder also writes a lease, who it is and, by the file's time, that it still lives. Another machine's lease that
has not moved for ``STALE`` seconds of the waiter's own clock is a dead process's and is taken over. Should two take it
over at once, both compile: twice the work, and the same entry.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import platform
import threading
import time
from pathlib import Path

BEAT, STALE = 2.0, 30.0  # seconds: between two signs of life; without one until the lease is a dead process's
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # a file system without flock


@functools.cache
def machine() -> str:
    """This run of this machine: what shares its flocks."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return platform.node()


class Lock:
    """Waits until it is this process's alone. OSError where the folder cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path, self.lease = path, path.with_suffix(".lease")
        self.file = -1
        flocked = self._flock()
        try:
            self._take_lease(flocked)
        except OSError:
            os.close(self.file)
            raise
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="layerplan-lease", daemon=True)
        self._beats.start()

    def _flock(self) -> bool:
        while True:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return False
                os.close(self.file)
                raise
            # the last holder removed the file that this waited for: whoever comes next makes a new one
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self.file), os.stat(self.path)):
                    return True
            os.close(self.file)

    def _take_lease(self, flocked: bool) -> None:
        text = json.dumps({"machine": machine(), "node": platform.node(), "pid": os.getpid()}).encode()
        seen, since = None, time.monotonic()
        while True:
            try:
                file = os.open(self.lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                owner, moved = self._owner()
                if moved is None:
                    continue  # given back meanwhile
                if moved != seen:
                    seen, since = moved, time.monotonic()
                # who holds a lease of this machine also holds its flock, which is ours now
                if (flocked and owner == machine()) or time.monotonic() - since > STALE:
                    self.lease.unlink(missing_ok=True)
                    continue
                time.sleep(0.1)
                continue
            with open(file, "wb") as out:
                out.write(text)
            return

    def _owner(self) -> tuple[str | None, int | None]:
        """Machine that the lease names, and when it last moved; opened, since shared file systems answer that anew."""
        try:
            with open(self.lease, encoding="utf-8") as file:
                moved = os.fstat(file.fileno()).st_mtime_ns
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return json.load(file)["machine"], moved
                return None, moved
        except FileNotFoundError:
            return None, None

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.lease)

    def release(self) -> None:
        """Lets the next one in."""
        self._over.set()
        self._beats.join()
        with contextlib.suppress(OSError):
            if self._owner()[0] == machine():  # another may have taken it over, had this process stood still
                self.lease.unlink()
            self.path.unlink()
        os.close(self.file)
