"""Fixtures of the object store."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest

from .object_store import ObjectStore, object_store, point_to


@pytest.fixture(scope="session")
def s3_server() -> Iterator[ObjectStore]:
    """One server for all tests that ask."""
    with object_store() as store:
        yield store


@pytest.fixture
def s3(s3_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server, with an empty bucket `bucket`, found by the environment; nothing was asked."""
    import s3fs

    point_to(monkeypatch, s3_server.endpoint)
    reset = urllib.request.Request(f"{s3_server.endpoint}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()
    s3fs.S3FileSystem().mkdir("bucket")
    s3_server.requests.clear()
    s3_server.denied = ""
    return s3_server


@pytest.fixture
def memory() -> Iterator[str]:
    """URL of a place in the memory of this process, which is emptied at the end."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield "memory://dumps"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
