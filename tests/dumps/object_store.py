"""A real S3 server on loopback that tells what was asked of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REGION = "us-east-1"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass
class ObjectStore:
    """Where the server is, and the requests it got.

    Attributes
    ----------
    endpoint : str
        Its address.
    requests : list of tuple
        Method, path with query, the asked range or "", status, and bytes of the answer's body.
    denied : str
        Methods that are answered with 403, separated by spaces.
    """

    endpoint: str = ""
    requests: list[tuple[str, str, str, int, int]] = field(default_factory=list)
    denied: str = ""

    def count(self, method: str, part: str = "") -> int:
        """Requests of a method whose path has a part."""
        return sum(each[0] == method and part in each[1] for each in self.requests)

    def sent(self, part: str = "") -> int:
        """Bytes that the server sent for paths that have a part."""
        return sum(each[4] for each in self.requests if each[0] == "GET" and part in each[1])

    def watched(self, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        """The server's application, its requests noted."""

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            method = environ["REQUEST_METHOD"]
            target = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
            if method in self.denied.split():
                self.requests.append((method, target, "", 403, 0))
                start("403 Forbidden", [("Content-Type", "application/xml")])
                return [DENIED] if method != "HEAD" else []
            status: list[str] = []

            def noted(code: str, headers: Any, *rest: Any) -> Any:
                status.append(code)
                return start(code, headers, *rest)

            body = list(app(environ, noted))
            size = sum(map(len, body)) if method != "HEAD" else 0
            ranged = environ.get("HTTP_RANGE", "")
            self.requests.append((method, target, ranged, int(status[0].split()[0]), size))
            return body

        return answer


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run the server in a thread, with a bucket `bucket`."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """Say nothing."""

    store = ObjectStore()
    app = store.watched(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def point_to(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let S3 clients find a server by the environment, as a user would, and give up quickly."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        patch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    patch.setattr(s3fs.S3FileSystem, "retries", 1)


def copy_into(folder: Path, url: str) -> None:
    """Put a folder's files into the store, not through the code that is tested."""
    import s3fs

    s3fs.S3FileSystem().put(f"{folder}/", url.removeprefix("s3://"), recursive=True)
