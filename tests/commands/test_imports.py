"""`deltad import` at a terminal: options, statuses, what is printed, what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltad.dumps import Dump
from tests.commands.app import deltad
from tests.dumps.factory import make_dump, read_metadata
from tests.probes.offline.exported import behavior, responses, same_dump, scores, write_json
from tests.probes.offline.test_trainers import exported


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of one seed that files of scores can hold."""
    policy = ("pre_collision", "post_collision", "pre_entropy", "post_entropy")
    run = tmp_path_factory.mktemp("recorded") / "run"
    return make_dump(run, arms=("none", "ratio"), seeds=(2,), optional=policy, rows=40)


@pytest.fixture(scope="module")
def files(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Its files of scores."""
    folder = tmp_path_factory.mktemp("files")
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in ("none", "ratio"):
        whole = responses(recorded, arm, 2)
        found |= {f"{arm}.{time}": scores(whole, time) for time in ("pre", "post")}
        found[arm] = behavior(whole)
    return {name: write_json(folder / f"{name}.jsonl", each) for name, each in found.items()}


def test_files_become_a_dump_that_answers(
    recorded: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    described = tmp_path / "metadata.json"
    described.write_text(
        json.dumps({
            "behavior": {"staleness": 1}, "readout": {"logits_rounded": True}, "tokenizer": "t",
            "colour": "red",
        }), encoding="utf-8",
    )  # fmt: skip
    for arm in ("none", "ratio"):
        done = deltad(
            "import", files[arm], run, "--pre", files[f"{arm}.pre"], "--post",
            files[f"{arm}.post"], "--arm", arm, "--seed", 2, "--vocab-size", 24,
            "--temperature", 0.7, "--model", "m", "--engine", "vllm", "--precision", "bfloat16",
            "--threshold", 0.15, "--divergence", "kl", "--metadata", described,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert done.stdout == (
            f"{run}: arm {arm}, seed 2: 8 responses, 40 tokens, top-4; the policy was read before "
            "and after the step\n"
        )
        same_dump(recorded, run, arm, 2)
    assert deltad("check", run).exit_code == 0
    theirs, ours = (
        json.loads(deltad("table", each, "--format", "json").stdout) for each in (recorded, run)
    )
    assert ours == theirs
    metadata = read_metadata(Dump.open(run).files("ratio")[0].path)
    assert metadata["update"] == {"mask": "ratio", "threshold": 0.15, "divergence": "kl"}
    assert metadata["behavior"] == {"staleness": 1, "engine": "vllm", "precision": "bfloat16"}
    assert metadata["readout"] == {"logits_rounded": True}
    assert (metadata["model"], metadata["tokenizer"], metadata["colour"]) == ("m", "t", "red")


def test_faults_are_listed_a_line_each_and_nothing_is_written(
    files: dict[str, Path], tmp_path: Path
) -> None:
    lines = files["none.pre"].read_text(encoding="utf-8").splitlines()
    broken = json.loads(lines[1])
    broken["logprob"][0] = broken["logprob"][2] = 0.5
    path = tmp_path / "pre.jsonl"
    path.write_text("\n".join([lines[0], json.dumps(broken), *lines[2:]]), encoding="utf-8")
    run = tmp_path / "run"
    done = deltad("import", files["none"], run, "--pre", path, "--vocab-size", 24)
    assert done.exit_code == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    places = [f"pre.jsonl, line 2, sequence {broken['sequence']}, position {at}" for at in (0, 2)]
    assert all(any(place in line for line in errors) for place in places)
    assert "note: nothing was written" in done.stderr
    assert not run.exists()


def test_a_dump_is_not_overwritten_unless_told(files: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("import", files["none"], run, "--pre", files["none.pre"], "--vocab-size", 24)
    assert deltad(*arguments).exit_code == 0
    again = deltad(*arguments)
    assert again.exit_code == 1
    assert "exists already: give `--existing replace`" in again.stderr
    assert deltad(*arguments, "--existing", "replace").exit_code == 0
    more = deltad(*arguments, "--existing", "append")
    assert more.exit_code == 1
    assert "occurs already" in more.stderr
    other = deltad(*arguments, "--seed", 3, "--temperature", 0.5)
    assert other.exit_code == 1
    assert "`temperature` must be the same in all files" in other.stderr


def test_requests_say_what_to_score(files: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "behavior.jsonl"
    write_json(
        source,
        [
            {"step": 1, "sequence": 0, "prompt_ids": [3], "token_id": [1], "topk_ids": [[1, 2]]},
            {"step": 1, "sequence": 1, "prompt_ids": [4], "token_id": [2], "topk_ids": [[5, -1]]},
        ],
    )
    output = tmp_path / "requests.jsonl"
    done = deltad("import", source, "--requests", output)
    assert done.exit_code == 0, done.output
    assert "note: 2 responses to score are in" in done.stderr
    requests = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert requests[1] == {
        "step": 1, "sequence": 1, "prompt_ids": [4], "token_id": [2], "ids": [[5]],
    }  # fmt: skip
    write_json(source, [{"sequence": 0}])
    done = deltad("import", source, "--requests", tmp_path / "other.jsonl")
    assert done.exit_code == 1
    assert "line 1, sequence 0, field `token_id`: is missing" in done.stderr
    assert not (tmp_path / "other.jsonl").exists()


def test_prime_rls_export_is_read_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = deltad(
        "import", exported(tmp_path), run, "--format", "prime-rl", "--vocab-size", 50,
        "--temperature", 0.6,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "12 tokens, top-1; the policy was read before the step" in done.stdout
    assert "12 tokens have no top-K lists: their D is unknown" in done.stderr
    assert "without the policy after the step there is no ΔD" in done.stderr
    metadata = Dump.open(run).metadata("actual")
    assert metadata.behavior["engine"] == "prime-rl"
    assert metadata.temperature == 0.6
    assert deltad("compare", run, "--criteria", "clip-higher").exit_code == 0
    assert deltad("check", run).exit_code == 0


def test_the_vocabulary_may_come_from_a_models_folder(
    files: dict[str, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for config in ({"vocab_size": 24}, {"text_config": {"vocab_size": 24}}):
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        run = tmp_path / "run"
        done = deltad("import", files["none"], run, "--model", model, "--existing", "replace")
        assert done.exit_code == 0, done.output
        assert Dump.open(run).vocab_size == 24
    done = deltad("import", files["none"], tmp_path / "other", "--model", "some/name")
    assert done.exit_code == 2
    assert "the size of the vocabulary must be known" in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--format", "xml"), "`--format` must be one of scoring, prime-rl"),
        (("--existing", "maybe"), "`--existing` must be one of refuse, replace, append"),
        (("--logprobs-mode", "cooked"), "`--logprobs-mode` must be one of raw"),
        (("--temperature", "0"), "the dump's metadata: `temperature` must be a positive number"),
        (("--arm", "a b"), "an arm's name must be letters"),
        (("--seed", str(2**40)), "a seed must be an int32"),
        (("--metadata", "nowhere.json"), "`--metadata`: cannot read nowhere.json"),
        (("--pre", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
        (("--threshold", "nan"), "the dump's metadata: metadata must be JSON"),
        (("--threshold", "-1"), "`threshold` must be a number of at least 0, got -1.0"),
        (("--divergence", "js"), "`--divergence` must be one of kl, tv, got 'js'"),
        (("--support", "x"), "`--support` must be one of union, replaced-last, got 'x'"),
        (("--top-k", "25"), "`top_k` must be at most `vocab_size`, got 25"),
        (("--top-k", str(2**40)), "`top_k` must be at most 2147483647"),
        (("--step", str(2**40)), "`--step` must be an int32"),
        (("--pre", "/dev/null"), "/dev/null is a pipe or a device"),
    ],
)
def test_bad_options(
    files: dict[str, Path], tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    done = deltad("import", files["none"], tmp_path / "run", "--vocab-size", 24, *options)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_source_and_a_run_are_needed(files: dict[str, Path]) -> None:
    done = deltad("import", files["none"])
    assert done.exit_code == 2
    assert "SOURCE… RUN must be files with the responses" in done.stderr


def test_fields_that_mean_nothing_are_told(tmp_path: Path) -> None:
    record: dict[str, Any] = {"sequence": 0, "token_id": [1], "advantage": 1, "reward": 1}
    source = write_json(tmp_path / "a.jsonl", [{**record, "behavior_logprob": [-1.0]}])
    done = deltad("import", source, tmp_path / "run", "--vocab-size", 9)
    assert done.exit_code == 0, done.output
    assert "passed over, having no meaning here: reward" in done.stderr
    assert "neither before nor after the step" in done.stdout
    quiet = deltad("import", source, tmp_path / "other", "--vocab-size", 9, "--quiet")
    assert quiet.stderr == ""


def test_an_arm_named_by_a_mask_needs_its_threshold(files: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("import", files["ratio"], run, "--pre", files["ratio.pre"], "--vocab-size", 24)
    done = deltad(*arguments, "--arm", "ratio")
    assert done.exit_code == 2
    assert "`update.threshold` must be a number" in done.stderr
    assert "give `--mask`, `--threshold` and `--divergence`" in done.stderr
    assert not run.exists()


@pytest.mark.parametrize("key", ["behavior", "readout", "update"])
def test_a_part_of_the_metadata_that_is_no_object(
    files: dict[str, Path], tmp_path: Path, key: str
) -> None:
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps({key: None}), encoding="utf-8")
    done = deltad("import", files["none"], tmp_path / "run", "--vocab-size", 24, "--metadata", path)
    assert done.exit_code == 2
    assert f"`{key}` of {path} must be a JSON object" in done.stderr


def test_files_are_not_taken_for_something_else(files: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "behavior.jsonl"
    source.write_bytes(files["none"].read_bytes())
    for arguments, says in (
        ((source,), "RUN must be a folder"),
        ((tmp_path / "run", "--pre", source, "--post", source), "before the step and after it"),
        (("--requests", source), "holds the responses: name another file"),
        (("--requests", tmp_path / "r", "--pre", source), "`--pre` has no part in `--requests`"),
    ):
        done = deltad("import", source, *arguments, "--vocab-size", 24)
        assert done.exit_code == 2, done.output
        assert says in done.stderr
        assert source.read_bytes() == files["none"].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
