"""Where checkpoint files lie: a local folder, or one that fsspec reaches (gs://, s3://, …).

Files are read by byte ranges into memory of the caller. Nothing is memory-mapped: a mapped file counts as resident
memory, and a failing disk would kill the process instead of raising an error.
"""

import os
import re
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

_MOST_AT_ONCE = 1 << 30  # bytes of one system call; Linux stops at 2 GiB
_MOST_SMALL = 1 << 28
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the tensor, the file and what was wanted."""


class LocalFile:
    """A file of this machine: `name` in its folder, `size` in bytes; `str` gives its path."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.size = path.stat().st_size

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def _descriptor(self) -> int:
        # One for all reads, so that the system sees them follow each other and reads ahead.
        number = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, number)
        return number

    def read_into(self, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes from `start` on. **Raises:** `CheckpointError` where that fails."""
        done, last = 0, start + len(out)
        try:
            while done < len(out):
                count = os.preadv(self._descriptor, [out[done : done + _MOST_AT_ONCE]], start + done)
                if count == 0:
                    raise CheckpointError(f"{self}: ends at byte {start + done}, wanted bytes {start} to {last}")
                done += count
        except OSError as error:
            raise CheckpointError(f"{self}: reading bytes {start} to {last} failed: {error}") from error


class LocalFolder:
    """A folder of this machine; `str` gives its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """Names of the files in it, sorted; not those of folders in it."""
        return sorted(path.name for path in self.path.iterdir() if path.is_file())

    def file(self, name: str) -> LocalFile:
        """One of its files."""
        return LocalFile(self.path / name)


class RemoteFile:
    """A file behind an fsspec file system; as `LocalFile`, `str` gives its URL."""

    def __init__(self, system: Any, path: str, size: int) -> None:
        self.system, self.path, self.size = system, path, size
        self.name = path.rpartition("/")[2]

    def __str__(self) -> str:
        return self.system.unstrip_protocol(self.path)

    def read_into(self, start: int, out: memoryview) -> None:
        """See `LocalFile.read_into`."""
        last = start + len(out)
        try:
            data = self.system.cat_file(self.path, start=start, end=last) if len(out) else b""
        except Exception as error:  # each file system has errors of its own
            raise CheckpointError(f"{self}: reading bytes {start} to {last} failed: {error}") from error
        if len(data) != len(out):
            raise CheckpointError(f"{self}: gave {len(data)} bytes, wanted bytes {start} to {last}")
        out[:] = data


class RemoteFolder:
    """A folder behind an fsspec file system, listed once."""

    def __init__(self, url: str) -> None:
        scheme = url.partition("://")[0]
        package = _PACKAGES.get(scheme, "fsspec")
        try:
            import fsspec

            self.system, self.path = fsspec.core.url_to_fs(url)
            found = self.system.ls(self.path, detail=True)
        except ImportError as error:
            raise CheckpointError(f"{url}: {error}; pip install {package}") from error
        except Exception as error:  # each file system has errors of its own
            raise CheckpointError(f"{url}: cannot be listed: {error}") from error
        self.sizes = {str(e["name"]).rpartition("/")[2]: int(e["size"] or 0) for e in found if e["type"] == "file"}
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        """See `LocalFolder.names`."""
        return sorted(self.sizes)

    def file(self, name: str) -> RemoteFile:
        """See `LocalFolder.file`."""
        return RemoteFile(self.system, f"{self.path.rstrip('/')}/{name}", self.sizes[name])


File = LocalFile | RemoteFile
Folder = LocalFolder | RemoteFolder


def local_destination(path: str | Path) -> Path:
    """A path to write to. **Raises:** `ValueError` for a URL: what is written goes to a local file system."""
    if re.match(r"[a-z][a-z0-9+]+:/", str(path)):
        raise ValueError(f"{path} is a URL; give a path of a file system of this machine")
    return Path(path)


def open_folder(source: str | Path) -> Folder:
    """The folder at a path, or at a URL that fsspec knows.

    **Raises:** `CheckpointError` where it is not a folder, or a package is missing.
    """
    if isinstance(source, str) and "://" in source:
        return RemoteFolder(source)
    if not Path(source).is_dir():
        raise CheckpointError(f"{source} is not a directory")
    return LocalFolder(Path(source))


def small_files(folder: Folder) -> list[str]:
    """Names of the files that travel with the weights: configuration, tokenizer, licence.

    Not hidden ones, and not those of more than 256 MiB: weights in another form.
    """
    return [
        name
        for name in folder.names()
        if not name.endswith(".safetensors") and not name.startswith(".") and folder.file(name).size <= _MOST_SMALL
    ]


def read_bytes(file: File) -> bytes:
    """A whole small file. **Raises:** `CheckpointError` for one over 256 MiB."""
    if file.size > _MOST_SMALL:
        raise CheckpointError(f"{file} has {file.size:,} bytes: too large to be part of a checkpoint")
    out = bytearray(file.size)
    file.read_into(0, memoryview(out))
    return bytes(out)


@contextmanager
def local_small_files(folder: Folder) -> Iterator[Path]:
    """A local folder with the small files of `folder`: itself, or a copy for the time of the `with`."""
    if isinstance(folder, LocalFolder):
        yield folder.path
        return
    with tempfile.TemporaryDirectory() as place:
        for name in small_files(folder):
            (Path(place) / name).write_bytes(read_bytes(folder.file(name)))
        yield Path(place)
