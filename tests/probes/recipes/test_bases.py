"""The base models that ship: the same numbers everywhere, and never another policy unnoticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from deltad.dumps import DumpError, check_dump
from deltad.probes.recipes import RecipeError, TinyRecipe, bases, record
from deltad.probes.recipes.bases import base_weights
from deltad.probes.recipes.describe import policy_hash
from tests.dumps.factory import edit_metadata, read_metadata

from .micro import micro

HASHES = {
    0: "e5119b8d6f226370ea19d47a8b213d9b84029e45e28cbc925a694bf8449bb691",
    9: "5708c1a7503a71706092c3bcba1a52c1ab6d55ae46a00960ff34e2841b3ee4d4",
}


@pytest.mark.parametrize("number", range(10))
def test_every_base_is_a_model_of_the_recipe_in_bfloat16_numbers(number: int) -> None:
    weights = base_weights(number)
    model = TinyRecipe(base=number).load().model
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, weights[name])
        assert torch.equal(value, value.bfloat16().float())
    if number in HASHES:
        assert policy_hash(model.state_dict()) == HASHES[number]
    assert len({policy_hash(base_weights(each)) for each in (0, number)}) == (number > 0) + 1


def test_a_hash_sees_names_shapes_dtypes_and_every_bit() -> None:
    zero = torch.zeros(2, 3)
    seen = {
        policy_hash(each)
        for each in (
            {"a": zero},
            {"b": zero},
            {"a": zero.t()},
            {"a": zero.double()},
            {"a": -zero},
            {"a": zero, "b": torch.tensor(1.0)},
        )
    }
    assert len(seen) == 6
    assert policy_hash({"a": zero, "b": zero}) == policy_hash({"b": zero, "a": zero.clone()})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"tiny-3\.safetensors, .* cannot be read .*: install deltad again"),
        (b"other", r"tiny-3\.safetensors, .* is damaged: its SHA-256 must be 335b.*, got d9298a10"),
    ],
)
def test_a_damaged_or_missing_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    monkeypatch.setattr(bases, "_FOLDER", tmp_path)
    if content is not None:
        (tmp_path / "tiny-3.safetensors").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        TinyRecipe(base=3).prepare(lambda text, fraction: None)


def test_every_file_names_its_start_and_its_arithmetic(whole_dump: Path) -> None:
    files = list(whole_dump.glob("arm=*/*/*.parquet"))
    said = [json.loads(pq.read_metadata(path).metadata[b"deltad"]) for path in files]
    start = policy_hash(micro().load().model.state_dict())
    for each in said:
        assert each["start"] == {"policy_sha256": start}  # pre-trained, so no base's number
        assert each["arithmetic"]["instruction_set"] == torch.backends.cpu.get_cpu_capability()
        assert each["arithmetic"]["torch"] == torch.__version__
        assert each["arithmetic"]["threads"] == 1


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"policy_sha256": "0" * 64}, "started from the policy with SHA-256 0000.* another folder"),
        (None, "does not say which policy it started from"),
    ],
)
def test_a_dump_of_another_start_is_not_resumed(
    cache: Path, whole_dump: Path, tmp_path: Path, start: object, message: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_dump, run)
    shutil.rmtree(run / "arm=ratio" / "seed=1")
    for path in run.glob("arm=*/*/*.parquet"):
        edit_metadata(path, start=start)
    before = {path: path.read_bytes() for path in run.rglob("*.parquet")}
    with pytest.raises(RecipeError, match=message):
        record(micro(), run, seeds=2, workers=0, store="all", resume=True, quiet=True)
    assert {path: path.read_bytes() for path in run.rglob("*.parquet")} == before


def test_a_dump_of_two_starts_is_found(whole_dump: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_dump, run)
    first, other = run / "arm=none/seed=0/part-0-0.parquet", run / "arm=ratio/seed=1"
    edit_metadata(first, drop=["start"])  # as by an earlier version; the others still agree
    assert check_dump(run, strict=False) == []
    part = next(other.glob("*.parquet"))
    edit_metadata(part, start={**read_metadata(part)["start"], "policy_sha256": "f" * 64})
    with pytest.raises(DumpError, match=r"arm=ratio/seed=1/.*: started from another policy than"):
        check_dump(run)


@pytest.mark.parametrize("start", [None, 5, [], {}, {"policy_sha256": 5}])
def test_a_start_that_says_nothing_is_found(
    whole_dump: Path, tmp_path: Path, start: object
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_dump, run)
    edit_metadata(run / "arm=none/seed=0/part-0-0.parquet", start=start)
    with pytest.raises(DumpError, match="`start` must be an object with `policy_sha256`"):
        check_dump(run)
