"""RUN may be a URL in every command; what cannot be reached is one sentence and status 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.commands.options import place as as_place
from deltad.commands.terminal import is_url
from deltad.dumps.storage import copy_tree, place
from tests.commands.app import assert_refused, deltad
from tests.dumps.factory import make_dump
from tests.dumps.object_store import object_store, point_to

COMMANDS = (
    ("table", "--format", "json"),
    ("tokens", "--outside"),
    ("check",),
    ("table", "--over", "threshold", "--values", "0.1,0.2"),
    ("doctor",),
    ("watch", "--once"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump whose pairs disagree."""
    made = tmp_path_factory.mktemp("places") / "run"
    return make_dump(made, rows=80, drift=1.5, ranks=1, parts=1, arms=("none", "ratio"))


@pytest.fixture
def url(run: Path) -> Iterator[str]:
    """The same dump behind a URL."""
    from fsspec.implementations.memory import MemoryFileSystem

    copy_tree(run, place("memory://dumps/run"))
    yield "memory://dumps/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_url_answers_as_the_folder_does(run: Path, url: str, command: tuple[object, ...]) -> None:
    name, *options = command
    here, there = deltad(name, run, *options), deltad(name, url, *options)
    assert here.exit_code == there.exit_code, there.output
    assert here.stdout
    assert there.stdout.replace(url, "RUN") == here.stdout.replace(str(run), "RUN")


def test_files_are_imported_to_a_url(tmp_path: Path) -> None:
    row = {
        "sequence": "a", "group": 0, "advantage": 1.0, "token_id": [1, 2],
        "behavior_logprob": [-0.5, -0.7], "topk_ids": [[1, 2], [2, 3]],
        "topk_behavior_logprobs": [[-0.5, -1.2], [-0.7, -1.1]],
    }  # fmt: skip
    source = tmp_path / "responses.jsonl"
    source.write_text(json.dumps(row) + "\n")
    url = "memory://dumps/imported"
    done = deltad("import", source, url, "--vocab-size", 24)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{url}: arm actual, seed 0: 1 responses, 2 tokens, top-2")
    assert_refused(deltad("import", source, url, "--vocab-size", 24), 1, "exists already")
    more = deltad("import", source, url, "--vocab-size", 24, "--existing", "replace")
    assert more.exit_code == 0, more.output
    assert deltad("check", url).exit_code == 0
    assert_refused(deltad("import", url, url, "--vocab-size", 24), 2, "only RUN may be a URL")


def test_what_appends_needs_a_folder(tmp_path: Path) -> None:
    refused = deltad("train", "tiny", "memory://dumps/trained")
    assert_refused(refused, 2, "a training needs a folder", "memory://dumps/trained")


def test_what_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(deltad("table", "memory://dumps/none"), 2, "memory://dumps/none does not exist")
    assert_refused(deltad("check", "nonsense://x/run"), 2, "Protocol not known: nonsense")
    point_to(monkeypatch, "http://127.0.0.1:9")
    assert_refused(deltad("table", "s3://b/run"), 2, "s3://b/run cannot be reached", "connect")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert_refused(deltad("table", "gs://b/run"), 2, "pip install 'deltad[remote]' gcsfs")


def test_a_server_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store() as store:
        point_to(monkeypatch, store.endpoint)
        assert_refused(deltad("table", "s3://nobucket/run"), 2, "s3://nobucket/run does not exist")
        store.denied = "GET HEAD"
        assert_refused(deltad("table", "s3://bucket/run"), 2, "may not be read", "credentials")


def test_a_place_is_read_as_it_is_written() -> None:
    assert as_place("a/b") == Path("a/b")
    assert not is_url(as_place("a/b"))
    assert str(as_place("memory://a//b")) == "memory://a//b"
    assert is_url(as_place("memory://a/b"))
