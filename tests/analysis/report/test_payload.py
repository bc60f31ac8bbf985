"""The viewer's data against the ΔD table and the registry of criteria."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from deltad.analysis import Question, QuestionError, TokenTable
from deltad.analysis.question import decider
from deltad.analysis.report import Payload, build_payload
from deltad.analysis.report.encode import QUANTUM, UNKNOWN
from deltad.dumps import Dump, batch_tokens, scalar_tokens, write_prompts
from tests.dumps.factory import make_dump, part_files, read_metadata, write_table

KEY = ["seed", "step", "sequence", "position"]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump with every optional column, rows without vectors and an empty seed."""

    def change(arm: str, seed: int, columns: dict[str, Any]) -> None:
        columns["delta_d_noise"] *= 1e8  # as large as ΔD often is

    path = tmp_path_factory.mktemp("payload") / "run"
    return Dump.open(
        make_dump(
            path, rows=70, seeds=(0, 1, 4), empty_seeds=(4,), null_vectors=0.2, drift=1.5,
            ranks=1, row_group_size=50, change=change,
        )
    )  # fmt: skip


def keys_of(payload: Payload) -> pd.DataFrame:
    """What identifies each token of the page."""
    columns, header = payload.columns, payload.header
    lengths = np.diff(columns["sequence_start"])
    seeds = np.array([each["seed"] for each in header["seeds"]])
    return pd.DataFrame(
        {
            "seed": np.repeat(seeds[columns["sequence_seed_index"]], lengths),
            "step": np.repeat(columns["sequence_step"], lengths),
            "group": np.repeat(columns["sequence_group"], lengths),
            "sequence": np.repeat(columns["sequence_sequence"], lengths),
            "position": columns["position"],
            "token_id": columns["token_id"],
        }
    )


def masked(payload: Payload, name: str, threshold: float) -> NDArray[np.bool_]:
    """What a criterion masks, as the page decides it."""
    rule = next(rule for rule in payload.header["criteria"] if rule["name"] == name)
    columns = payload.columns
    if rule["masked"]:
        return np.asarray(columns[rule["masked"]] == 1)
    push = columns["advantage"].astype(np.float64) * columns[rule["direction"]]
    return np.asarray((columns[rule["proximity"]] > threshold) & (push > 0))


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_numbers_are_those_of_the_token_table(dump: Dump, divergence: str) -> None:
    question = Question(0.1, divergence, protocol="shared:ratio")
    payload = build_payload(dump, question)
    found = keys_of(payload)
    columns, header = payload.columns, payload.header
    for name in ("advantage", "d_pre", "r_minus_1", "d_dot_aggregated", "d_dot_local"):
        found[name] = columns[name]
    assert header["arms"] == ["ratio", "none", "predictive-kl-aggregated"]
    for index in range(3):
        found[f"delta_d_{index}"] = columns[f"delta_d_{index}"]
        found[f"in_loss_{index}"] = columns[f"in_loss_{index}"] == 1
    found["token"] = np.array(header["texts"])[columns["text"]]
    for index, arm in enumerate(header["arms"]):
        table = TokenTable(dump, Question(0.1, divergence, protocol=f"shared:{arm}")).to_frame()
        table = table.sort_values(KEY, kind="stable").reset_index(drop=True)
        for name in (*KEY, "group", "token_id", "advantage", "d_pre", "token"):
            np.testing.assert_array_equal(found[name], table[name], name)
        np.testing.assert_array_equal(found["d_dot_aggregated"], table["d_dot"])
        np.testing.assert_allclose(found["d_dot_local"], table["d_dot_local"], rtol=1e-6)
        np.testing.assert_allclose(found["r_minus_1"] + 1, table["ratio"], rtol=1e-14)
        np.testing.assert_array_equal(found[f"delta_d_{index}"], table["delta_d"])
        np.testing.assert_array_equal(found[f"in_loss_{index}"], table["in_loss"])
        undetermined = table["undetermined"].astype("boolean").astype("Int8").fillna(2)
        assert {*undetermined} == {0, 1, 2}
        np.testing.assert_array_equal(columns[f"undetermined_{index}"], undetermined)


@pytest.mark.parametrize("divergence", ["kl", "tv"])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.15, 0.7])
def test_every_criterion_decides_on_the_page_as_in_the_registry(
    dump: Dump, divergence: str, threshold: float
) -> None:
    payload = build_payload(dump, Question(0.3, divergence, protocol="shared:none"))
    names = [rule["name"] for rule in payload.header["criteria"]]
    assert {"ratio", f"predictive-{divergence}-full", "binary-tv", "clip-higher", "drpo"} < {*names}
    keys, rows = keys_of(payload), []
    for seed in dump.seeds("none"):
        for batch in dump.batches("none", seed):
            metadata = dump.metadata("none")
            sets = [(batch_tokens(batch, metadata), batch.vectors)]
            sets.append((scalar_tokens(batch), ~batch.vectors))
            for tokens, at in sets:
                if not at.any():
                    continue
                block = pd.DataFrame({name: batch[name][at] for name in KEY[1:]})
                block["seed"] = seed
                for name in names:
                    needs_top_k = name.startswith(("ratio", "predict")) and name[-5:] != "-full"
                    block[name] = False
                    if not (needs_top_k and tokens.support is None):
                        keep = decider(name).keep(
                            tokens, threshold=threshold, divergence=divergence
                        )
                        block[name] = ~keep
                rows.append(block)
    expected = keys[KEY].merge(pd.concat(rows), on=KEY, how="left", validate="one_to_one")
    for name in names:
        decided = masked(payload, name, threshold)
        np.testing.assert_array_equal(decided, expected[name].astype(bool), name)
    assert sum(masked(payload, name, 0.15).any() for name in names) >= len(names) - 1


def test_weights_and_bounds_are_read_from_the_files_that_have_them(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", ranks=1, parts=2)
    for part in part_files(path):
        if part.name == "part-0-0.parquet":
            table = pq.ParquetFile(part).read().drop_columns(["delta_d_noise", "weight"])
            write_table(part, table, read_metadata(part))
    columns = build_payload(Dump.open(path)).columns
    assert {*columns["weight"]} == {1, 1.25, 1.5, 1.75}
    assert {*columns["undetermined_0"]} == {0, 2}


def test_without_bounds_and_unlike_weights_the_page_has_no_such_columns(tmp_path: Path) -> None:
    def change(arm: str, seed: int, columns: dict[str, Any]) -> None:
        columns["delta_d_noise"][:] = np.nan
        columns["weight"][:] = 4

    columns = build_payload(Dump.open(make_dump(tmp_path / "run", change=change))).columns
    assert not [name for name in columns if "undetermined" in name or name == "weight"]


def test_top_k_lists_are_those_stored_to_half_a_step(dump: Dump) -> None:
    payload = build_payload(dump, Question(protocol="shared:none"))
    columns = payload.columns
    keys = keys_of(payload)
    shape = (-1, dump.top_k)
    mu = columns["detail_mu"].reshape(shape)
    pi = mu + columns["detail_pi"].reshape(shape)
    post = pi + columns["detail_post"].reshape(shape)
    lists = {"behavior": mu, "pre": pi, "post": post}
    ids = columns["detail_ids"].reshape(shape)
    place = {tuple(keys.loc[row, KEY]): at for at, row in enumerate(columns["detail_row"])}
    seen = 0
    for seed in dump.seeds("none"):
        for batch in dump.batches("none", seed):
            for row in np.flatnonzero(batch.vectors):
                at = place[seed, *(batch[name][row] for name in KEY[1:])]
                seen += 1
                np.testing.assert_array_equal(ids[at], batch["topk_ids"][row])
                there = ids[at] >= 0
                for name, steps in lists.items():
                    stored = -batch[f"topk_{name}_logprobs"][row][there].astype(np.float64)
                    near = stored < 31
                    error = np.abs(steps[at][there] * QUANTUM - stored)[near]
                    assert (error <= 0.51 * QUANTUM).all()
                    assert (steps[at][~there] == UNKNOWN).all()
    assert seen == len(columns["detail_row"]) == payload.header["details"]["with_vectors"]


def test_too_many_tokens_leave_the_largest_d_and_a_floor(dump: Dump) -> None:
    whole = build_payload(dump).columns["d_pre"]
    payload = build_payload(dump, tokens=30)
    header, kept = payload.header, payload.columns["d_pre"]
    assert 0 < len(kept) <= 30
    assert header["floor"] > 0
    assert header["threshold"] == max(0.15, header["floor"])
    assert "--tokens" in header["floor_reason"]
    np.testing.assert_array_equal(np.sort(kept), np.sort(whole[whole > header["floor"]]))
    assert len(header["arms"]) == 3


def test_a_thinned_dump_has_the_stored_threshold_as_its_floor(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", stored=("kl", 0.05))
    header = build_payload(Dump.open(path)).header
    assert header["floor"] == 0.05
    assert "stores only tokens with kl above 0.05" in header["floor_reason"]
    assert [each["tokens"] for each in header["seeds"]] == [60, 60]
    assert header["rows"] < 120


def test_a_dump_of_near_vectors_has_their_threshold_as_its_floor(tmp_path: Path) -> None:
    near = {"rule": "near", "divergence": "kl", "threshold": 0.05, "sample": 0.5}
    path = make_dump(tmp_path / "run", metadata={"vectors": near})
    header = build_payload(Dump.open(path)).header
    assert header["floor"] == 0.05
    assert "keeps vectors only of tokens with kl of 0.05 or more" in header["floor_reason"]


def test_seeds_can_be_chosen_and_must_exist(dump: Dump) -> None:
    payload = build_payload(dump, seeds=[1])
    assert [each["seed"] for each in payload.header["seeds"]] == [1]
    assert set(keys_of(payload)["seed"]) == {1}
    with pytest.raises(QuestionError, match=r"no seed 9 .*its seeds are 0, 1, 4"):
        build_payload(dump, seeds=[9])
    with pytest.raises(QuestionError, match="`tokens` must be at least 1"):
        build_payload(dump, tokens=0)


def test_a_bare_dump_is_enough(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", arms=("actual",), optional=(), null_vectors=1.0)
    payload = build_payload(Dump.open(path))
    assert payload.header["texts"] == []
    assert np.isnan(payload.columns["d_pre"]).all()
    assert payload.header["details"]["rows"] == 0
    names = {rule["name"] for rule in payload.header["criteria"]}
    assert {"ratio", "predictive-kl-aggregated", "clip-higher"} <= names
    assert "predictive-kl-exact" not in names


def test_a_dump_without_rows_is_enough(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", seeds=(0, 1), empty_seeds=(0, 1))
    payload = build_payload(Dump.open(path))
    assert payload.header["rows"] == 0
    assert all(len(values) <= 1 for values in payload.columns.values())
    assert payload.encoded().keys() == payload.header["columns"].keys()


def test_an_arm_with_other_tokens_is_left_out_and_named(tmp_path: Path) -> None:
    def change(arm: str, seed: int, columns: dict[str, Any]) -> None:
        if arm == "ratio":
            columns["position"] += 1

    path = make_dump(tmp_path / "run", arms=("none", "ratio", "zero-step"), change=change)
    header = build_payload(Dump.open(path)).header
    assert header["arms"] == ["none"]
    assert header["left_out"]["ratio"] == "its tokens are not those of the other arms"
    assert "zero-step" in header["left_out"]


def test_own_shows_the_arm_of_the_criterion_first(dump: Dump) -> None:
    header = build_payload(dump, Question(protocol="own")).header
    assert header["protocol"] == "own"
    assert header["arms"] == ["predictive-kl-aggregated", "none", "ratio"]


def test_a_weight_can_be_asked_for_though_it_masks_nothing(dump: Dump) -> None:
    payload = build_payload(dump, Question(criterion="tis", baseline="none"))
    names = [rule["name"] for rule in payload.header["criteria"]]
    assert {"tis", "none"} <= {*names}
    assert "cispo" not in names
    assert not masked(payload, "tis", 0.0).any()


def test_prompts_come_with_the_groups_on_the_page(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", seeds=(0, 1))
    rows = [
        {"group": group, "prompt": f"p{group}", "prompt_ids": [1], "answer": None}
        for group in (100, 101, 999)
    ]
    write_prompts(path, seed=1, rows=rows)
    prompts = build_payload(Dump.open(path)).header["prompts"]
    assert [(each["seed_index"], each["group"], each["prompt"]) for each in prompts] == [
        (1, 100, "p100"),
        (1, 101, "p101"),
    ]


def test_every_column_is_named_with_its_length(dump: Dump) -> None:
    payload = build_payload(dump)
    for name, entry in payload.header["columns"].items():
        assert entry["length"] == payload.columns[name].size
