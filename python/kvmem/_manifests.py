"""The manifests that a disk has been used with, beside its slots: a miss can be explained later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .errors import InvalidArgument
from .manifest import Manifest

FOLDER = "manifests"
SUFFIX = ".kvmf"
KEPT_MOST = 256
"""Files; the oldest go. Their blocks are a miss as before, only without an explanation."""


class Manifests:
    """The folder `manifests` of a disk that this process has open. Any thread.

    A file is named after the digest of the manifest and holds its canonical form. Its time is that
    of its last use. What cannot be read or is not what its name says is not there.
    """

    def __init__(self, disk: Path) -> None:
        self._folder = disk / FOLDER

    def remember(self, manifest: Manifest) -> None:
        """Write it, or renew its time. Raises OSError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._path(manifest.digest)
        if self.find(manifest.digest) == manifest:
            os.utime(path)
            return
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)  # left by a crash
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        for oldest in self._newest_first()[KEPT_MOST:]:
            oldest.unlink(missing_ok=True)

    def find(self, digest: bytes) -> Manifest | None:
        return _read(self._path(digest))

    def newest_other(self, than: Manifest) -> Manifest | None:
        """Find the one that was used last, but for `than`."""
        return next((each for each in self._all() if each != than), None)

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}{SUFFIX}"

    def _newest_first(self) -> list[Path]:
        with os.scandir(self._folder) as entries:
            times = [(e.stat().st_mtime_ns, e.path) for e in entries if e.name.endswith(SUFFIX)]
        return [Path(path) for _, path in sorted(times, reverse=True)]

    def _all(self) -> Iterator[Manifest]:
        try:
            paths = self._newest_first()
        except OSError:
            return
        yield from filter(None, map(_read, paths))


def _read(path: Path) -> Manifest | None:
    try:
        found = Manifest.from_bytes(path.read_bytes())
    except (OSError, InvalidArgument):
        return None
    return found if found.hexdigest == path.stem else None
