"""The viewer's data against the ΔD table and the registry of rules."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from deltad.analysis import Question, QuestionError, TokenTable
from deltad.analysis.report import Viewer, token_viewer
from deltad.dumps import Dump, write_prompts
from deltad.masks import RULES, Rule
from tests.dumps.factory import make_dump, part_files, read_metadata, write_table

KEY = ["seed", "step", "sequence", "position"]
OWN = Rule("own", region=lambda tokens: tokens["pre_entropy"], push="kl-exact",
           needs=("pre_entropy",), threshold=1.0)  # fmt: skip


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump with every optional column, rows without top-K log-probs and an empty seed."""

    def change(arm: str, seed: int, columns: dict[str, Any]) -> None:
        columns["delta_d_noise"] *= 1e8  # as large as ΔD often is

    path = tmp_path_factory.mktemp("viewer") / "run"
    return Dump.open(
        make_dump(
            path, rows=70, seeds=(0, 1, 4), empty_seeds=(4,), null_vectors=0.2, drift=1.5,
            ranks=1, row_group_size=50, change=change,
        )
    )  # fmt: skip


def viewer_of(dump: Dump, question: Question | None = None, **how: Any) -> Viewer:
    """What the page of a dump with tokens is given."""
    found = token_viewer(dump, question, **how)
    assert found is not None
    return found


def frame_of(viewer: Viewer) -> pd.DataFrame:
    """What identifies each token of the page."""
    columns = viewer.columns
    lengths = np.diff(columns["response_start"])
    found = {
        name: np.repeat(columns[f"response_{name}"], lengths)
        for name in ("seed", "step", "group", "sequence")
    }
    found["seed"] = np.array([each["seed"] for each in viewer.header["seeds"]])[found["seed"]]
    return pd.DataFrame(found | {name: columns[name] for name in ("position", "token_id")})


def masked(viewer: Viewer, name: str, threshold: float) -> NDArray[np.bool_]:
    """What a rule masks, as the page decides it."""
    rule = next(rule for rule in viewer.header["rules"] if rule["name"] == name)
    columns = viewer.columns
    if rule["keep"]:
        return np.asarray(columns[rule["keep"]] == 0)
    limit = threshold if rule["threshold"] is None else rule["threshold"]
    push = columns["advantage"].astype(np.float64) * columns[rule["push"]]
    return np.asarray((columns[rule["region"]] > limit) & (push > 0))


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_numbers_are_those_of_the_token_table(dump: Dump, divergence: str) -> None:
    viewer = viewer_of(dump, Question(0.1, divergence, protocol="shared:ratio"))
    found, columns, header = frame_of(viewer), viewer.columns, viewer.header
    assert header["arms"] == ["ratio", "none", "predictive-kl-aggregated"]
    texts = np.array(header["texts"])[columns["text"]]
    for index, arm in enumerate(header["arms"]):
        table = TokenTable(dump, Question(0.1, divergence, protocol=f"shared:{arm}")).to_frame()
        table = table.sort_values(KEY, kind="stable").reset_index(drop=True)
        pd.testing.assert_frame_equal(found, table[found.columns], check_dtype=False)
        for name, values in (
            ("d_pre", columns["value-divergence"]),
            ("d_dot", columns[header["shown"]["column"]]),
            ("advantage", columns["advantage"]),
            ("token", texts),
            ("delta_d", columns[f"delta_d_{index}"]),
            ("in_loss", columns[f"in_loss_{index}"] == 1),
        ):
            np.testing.assert_array_equal(values, table[name], name)
        np.testing.assert_allclose(columns["d_dot_local"], table["d_dot_local"], rtol=1e-6)
        np.testing.assert_allclose(columns["value-ratio"] + 1, table["ratio"], rtol=1e-14)
        undetermined = table["undetermined"].astype("boolean").astype("Int8").fillna(2)
        assert {*undetermined} == {0, 1, 2}
        np.testing.assert_array_equal(columns[f"undetermined_{index}"], undetermined)


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_every_rule_decides_on_the_page_as_in_the_token_table(dump: Dump, divergence: str) -> None:
    own = OWN if divergence == "kl" else Rule("own", keep=lambda t, delta, _: t.ratio < 1 + delta)
    viewer = viewer_of(dump, Question(0.3, divergence, protocol="shared:none"), criteria=[own])
    rules = {**RULES, "own": own}
    names = [rule["name"] for rule in viewer.header["rules"]]
    assert {"ratio", f"predictive-{divergence}-full", "binary-tv", "drpo", "own"} < {*names}
    for threshold in (0.0, 0.02, 0.3, 0.7):
        asked = [rules[each["name"]] for each in viewer.header["rules"]
                 if threshold == 0.3 or not each["keep"]]  # fmt: skip
        question = Question(threshold, divergence, protocol="shared:none")
        frame = TokenTable(dump, question, criteria=asked).to_frame().sort_values(KEY)
        for each in asked:
            expected = frame[f"keep_{each.name.replace('-', '_')}"].eq(False)
            np.testing.assert_array_equal(masked(viewer, each.name, threshold), expected, each.name)


def test_regions_and_pushes_of_one_name_are_one_column(dump: Dump) -> None:
    mine = Rule("mine", region=lambda tokens: tokens.log_ratio)
    rules = {each["name"]: each for each in viewer_of(dump, criteria=[mine]).header["rules"]}
    assert rules["ratio"]["region"] == rules["predictive-kl-exact"]["region"]
    assert rules["ratio"]["push"] == rules["mine"]["push"] != rules["mine"]["region"]
    assert rules["clip-higher"]["threshold"] == 0
    assert rules["icepop"]["keep"]


def test_weights_and_bounds_are_read_from_the_files_that_have_them(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", ranks=1, parts=2)
    for part in part_files(path):
        if part.name == "part-0-0.parquet":
            table = pq.ParquetFile(part).read().drop_columns(["delta_d_noise", "weight"])
            write_table(part, table, read_metadata(part))
    columns = viewer_of(Dump.open(path)).columns
    assert {*columns["weight"]} == {1, 1.25, 1.5, 1.75}
    assert {*columns["undetermined_0"]} == {0, 2}


def test_without_bounds_and_unlike_weights_there_are_no_such_columns(tmp_path: Path) -> None:
    def change(arm: str, seed: int, columns: dict[str, Any]) -> None:
        columns["delta_d_noise"][:] = np.nan
        columns["weight"][:] = 4

    columns = viewer_of(Dump.open(make_dump(tmp_path / "run", change=change))).columns
    assert not [name for name in columns if "undetermined" in name or name == "weight"]


def test_columns_come_back_from_the_page_to_the_last_bit(dump: Dump) -> None:
    viewer = viewer_of(dump)
    for name, text in viewer.encoded().items():
        values = viewer.columns[name]
        planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
        rows = planes.reshape(values.itemsize, -1).T
        assert rows.tobytes() == values.astype(values.dtype.newbyteorder("<")).tobytes(), name
        assert viewer.header["columns"][name]["length"] == values.size


def test_too_many_tokens_leave_the_largest_d_and_a_floor(dump: Dump) -> None:
    whole = viewer_of(dump).columns["value-divergence"]
    viewer = viewer_of(dump, tokens=30)
    header, kept = viewer.header, viewer.columns["value-divergence"]
    assert 0 < len(kept) <= 30
    assert header["threshold"] == max(0.15, header["floor"]) > 0
    assert "--tokens" in header["floor_reason"]
    np.testing.assert_array_equal(np.sort(kept), np.sort(whole[whole > header["floor"]]))
    assert len(header["arms"]) == 3


def test_what_a_dump_left_out_is_the_floor(tmp_path: Path) -> None:
    header = viewer_of(Dump.open(make_dump(tmp_path / "thin", stored=("kl", 0.05)))).header
    assert header["floor"] == 0.05
    assert "stores only tokens with kl above 0.05" in header["floor_reason"]
    assert [each["tokens"] for each in header["seeds"]] == [60, 60]
    near = {"rule": "near", "divergence": "kl", "threshold": 0.05, "sample": 0.5}
    header = viewer_of(Dump.open(make_dump(tmp_path / "near", metadata={"vectors": near}))).header
    assert header["floor"] == 0.05
    assert "top-K log-probs only of tokens with kl of 0.05 or more" in header["floor_reason"]


def test_seeds_can_be_chosen_and_must_exist(dump: Dump) -> None:
    assert {*frame_of(viewer_of(dump, seeds=[1]))["seed"]} == {1}
    with pytest.raises(QuestionError, match=r"no seed 9 .*its seeds are 0, 1, 4"):
        token_viewer(dump, seeds=[9])
    with pytest.raises(QuestionError, match="`tokens` must be at least 1"):
        token_viewer(dump, tokens=0)


def test_a_bare_dump_is_enough_and_unknown_stays_unknown(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", arms=("actual",), optional=(), null_vectors=1.0)
    viewer = viewer_of(Dump.open(path))
    assert viewer.header["texts"] == []
    assert np.isnan(viewer.columns["value-divergence"]).all()
    assert not any(each["known"] for each in viewer.header["seeds"])
    assert viewer.header["details"]["rows"] == 0
    names = {rule["name"] for rule in viewer.header["rules"]}
    assert {"ratio", "predictive-kl-aggregated", "clip-higher"} <= names
    assert "predictive-kl-exact" not in names
    empty = Dump.open(make_dump(tmp_path / "empty", seeds=(0, 1), empty_seeds=(0, 1)))
    assert token_viewer(empty) is None


def test_an_arm_with_other_tokens_is_left_out_and_named(tmp_path: Path) -> None:
    def change(arm: str, seed: int, columns: dict[str, Any]) -> None:
        if arm == "ratio":
            columns["position"] += 1

    path = make_dump(tmp_path / "run", arms=("none", "ratio", "zero-step"), change=change)
    header = viewer_of(Dump.open(path)).header
    assert header["arms"] == ["none"]
    assert header["left_out"]["ratio"] == "its tokens are not those of the other arms"
    assert "zero-step" in header["left_out"]


def test_own_shows_the_arm_of_the_criterion_first(dump: Dump) -> None:
    header = viewer_of(dump, Question(protocol="own")).header
    assert header["arms"] == ["predictive-kl-aggregated", "none", "ratio"]


def test_a_weight_that_masks_nothing_is_there_only_if_asked_for(dump: Dump) -> None:
    viewer = viewer_of(dump, Question(criterion="tis", baseline="none"))
    names = {rule["name"] for rule in viewer.header["rules"]}
    assert {"tis", "none"} <= names
    assert "cispo" not in names
    assert not masked(viewer, "tis", 0.0).any()


def test_long_texts_are_cut_and_counted(tmp_path: Path) -> None:
    def change(arm: str, seed: int, columns: dict[str, Any]) -> None:
        texts = ["x" * 2_000_000 if at % 3 else "y" for at in range(len(columns["token"]))]
        columns["token"] = np.array(texts, dtype=object)

    path = make_dump(tmp_path / "run", arms=("none",), seeds=(0,), change=change, rows=30)
    rows = [{"group": 100, "prompt": "p" * 100_000, "prompt_ids": [], "answer": None}]
    write_prompts(path, seed=0, rows=rows)
    header = viewer_of(Dump.open(path)).header
    assert sorted(header["texts"]) == ["x" * 200 + "…", "y"]
    assert header["cut"] == 20
    assert [len(each["prompt"]) for each in header["prompts"]] == [20_001]
