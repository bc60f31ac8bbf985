"""The ladder's shares against an independent count, and what its figure draws."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.analysis import LADDER_TABLE_COLUMNS, LadderTable, Question, QuestionError, ladder_table
from deltad.analysis.tables.ladder import RUNGS, SETS
from deltad.analysis.tables.rates import rate_table
from deltad.dumps import Dump
from deltad.masks import Rule
from tests.analysis.bruteforce import direction, divergence, keeps, read_rows, support
from tests.dumps.factory import NULLABLE, OPTIONAL, edit, make_dump, part_files

PAIR = ("predictive-kl-aggregated", "ratio")
COLUMNS = {rung.name: rung.column for rung in RUNGS}
LADDER = {
    "divergence": "kl", "threshold": 0.15, "criterion": PAIR[0], "baseline": PAIR[1],
    "methods": {"own": "gradients", "update": "jvp"}, "reasons": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dump(
        tmp_path_factory.mktemp("ladder") / "run", rows=150, drift=1.5, seeds=(0, 1, 3),
        null_vectors=0.1, metadata={"ladder": LADDER},
        optional=[name for name in OPTIONAL if name != "weight"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def table(run: Path) -> LadderTable:
    return ladder_table(Dump.open(run), criteria=["predictive-kl-exact", "clip-higher"])


@functools.cache
def outside(run: Path, family: str) -> list[tuple[int, dict[str, Any], Any, float, float, float]]:
    """Seed, row, both policies, D, ΔD and the exact first-order change of the tokens outside."""
    rows, _, n = read_rows(run, "none")
    found = []
    for seed, mine in rows.items():
        for row in mine:
            if row["topk_ids"] is None:
                continue
            before = support(row, "pre", n)
            d = divergence(before, family)
            if d > 0.15:
                change = divergence(support(row, "post", n), family) - d
                exact = row["advantage"] * direction(before, family, "exact", row["pre_collision"])
                found.append((seed, row, before, d, change, exact))
    return found


def counted(
    run: Path, rung: str, criterion: str, within: str, *, family: str = "kl"
) -> tuple[list[dict[str, Any]], int]:
    """Every token of a set that has a rung: grows, foretold, weight; and tokens of the set."""
    pair = (f"predictive-{family}-aggregated", "ratio")
    every: list[dict[str, Any]] = []
    for seed, row, before, d, change, exact in outside(run, family):
        kept = {name: keeps(name, row, before, d, 0.15) for name in (*pair, criterion)}
        value = {"logits": exact, "realized": change}.get(rung, row.get(COLUMNS[rung]))
        every.append(
            {
                "seed": seed,
                "disagree": kept[pair[0]] != kept[pair[1]],
                "sampled": row["linear_delta_own"] is not None,
                "grows": None if value is None else value > 0,
                "made": change > 0,
                "masked": not kept[criterion],
            }
        )
    for each in every:
        kind = [
            other
            for other in every
            if (other["seed"], other["disagree"]) == (each["seed"], each["disagree"])
        ]
        sampled = sum(other["sampled"] for other in kind)
        each["weight"] = len(kind) / sampled if sampled else 0
    chosen = [each for each in every if each["disagree"] or within == "outside"]
    return [each for each in chosen if each["grows"] is not None], len(chosen)


@pytest.mark.parametrize("within", SETS)
@pytest.mark.parametrize("rung", [rung.name for rung in RUNGS])
@pytest.mark.parametrize("criterion", [*PAIR, "clip-higher"])
def test_shares_are_those_of_an_independent_count(
    run: Path, table: LadderTable, rung: str, criterion: str, within: str
) -> None:
    found, tokens = counted(run, rung, criterion, within)
    weights = [each["weight"] if rung in ("own", "sequence") else 1 for each in found]
    assert table.tokens(within) == tokens > 10
    assert len(found) < tokens if rung in ("own", "sequence") else len(found) == tokens

    def total(values: list[bool]) -> float:
        return math.fsum(w for w, value in zip(weights, values, strict=True) if value)

    for share, values in (
        (table.right(rung, criterion, within), [e["masked"] == e["grows"] for e in found]),
        (table.increase(rung, within), [e["grows"] for e in found]),
        (table.agreement(rung, within), [e["grows"] == e["made"] for e in found]),
    ):
        assert share.part == pytest.approx(total(values))
        assert share.whole == pytest.approx(math.fsum(weights))
        assert share.ci95[0] <= share.value <= share.ci95[1]
    rate = table.increase(rung, within).value
    assert table.constant_guess(rung, within) == max(rate, 1 - rate)


def test_sampled_tokens_stand_for_their_kind(table: LadderTable) -> None:
    """Weighted, a sampled rung counts as many tokens as there are outside."""
    assert table.sampled() < table.tokens()
    for within in SETS:
        assert table.right("own", "ratio", within).whole == pytest.approx(table.tokens(within))


def test_costs_add_up_where_every_rung_has_the_same_tokens(tmp_path: Path) -> None:
    run = make_dump(
        tmp_path / "run", rows=100, drift=1.5, metadata={"ladder": LADDER},
        change=lambda arm, seed, columns: columns.update(
            {
                    name: np.nan_to_num(columns[name], nan=0.5)
                    for name in NULLABLE
                    if name != "delta_d_noise"
                }
        ),
    )  # fmt: skip
    table = ladder_table(Dump.open(run))
    for within in SETS:
        for name in PAIR:
            costs = [table.cost(rung.name, name, within).value for rung in RUNGS]
            assert 1 + math.fsum(costs) == pytest.approx(table.right("triple", name, within).value)
    assert table.right("logits", "ratio", "disagreement").value == pytest.approx(
        1 - table.right("logits", PAIR[0], "disagreement").value
    )


def test_the_exact_prediction_is_right_on_the_lowest_rung(table: LadderTable) -> None:
    assert table.right("logits", "predictive-kl-exact").value == 1
    assert table.cost("logits", "predictive-kl-exact").value == 0
    cost = table.cost("logits", "ratio").value
    assert cost == pytest.approx(table.right("logits", "ratio").value - 1)


def test_the_realized_rung_is_what_the_rate_table_counts(run: Path, table: LadderTable) -> None:
    pair = rate_table(Dump.open(run)).pair
    assert table.tokens() == pair.outside.tokens
    assert table.increase("realized").value == pair.outside.increase_rate
    for name, side in zip(PAIR, ("criterion", "baseline"), strict=True):
        right = table.right("realized", name, "disagreement")
        assert right.value == pair.accuracy(side, "disagreement").value


def test_a_dump_without_the_ladder_still_has_its_ends(tmp_path: Path) -> None:
    optional = [name for name in OPTIONAL if name not in COLUMNS.values()]
    run = make_dump(tmp_path / "run", drift=1.5, optional=optional)
    table = ladder_table(Dump.open(run))
    assert [rung.name for rung in table.rungs] == ["logits", "realized"]
    text = " ".join(str(table).split())
    assert "Missing: its own gradient (column `linear_delta_own` is missing)." in text
    assert "deltad record … --ladder" in text
    assert "UpdateProbe(..., ladder=Ladder())" in text
    assert table.cause("realized").startswith("parameter sharing + other tokens")
    assert table.cost("realized", "ratio").value == pytest.approx(
        table.right("realized", "ratio").value - table.right("logits", "ratio").value
    )
    run = make_dump(tmp_path / "bare", drift=1.5, optional=())
    table = ladder_table(Dump.open(run))
    assert [rung.name for rung in table.rungs] == ["realized"]
    assert table.missing["logits"] == "column `pre_collision` is missing"


def test_columns_that_follow_another_divergence_are_not_used(run: Path) -> None:
    table = ladder_table(Dump.open(run), Question(divergence="tv"))
    assert [rung.name for rung in table.rungs] == ["logits", "realized"]
    assert table.missing["own"] == "column `linear_delta_own` follows the divergence kl, not tv"
    found, tokens = counted(run, "logits", "ratio", "outside", family="tv")
    assert table.tokens() == tokens
    assert table.right("logits", "ratio").part == sum(
        each["masked"] == each["grows"] for each in found
    )


def test_a_rung_that_is_null_throughout_is_missing_and_says_why(tmp_path: Path) -> None:
    reasons = {"batch": "the optimizer takes its gradients in a closure"}
    run = make_dump(
        tmp_path / "run", drift=1.5, metadata={"ladder": {**LADDER, "reasons": reasons}},
        change=lambda arm, seed, columns: columns.update(
            linear_delta_batch=np.full_like(columns["linear_delta_batch"], np.nan)
        ),
    )  # fmt: skip
    table = ladder_table(Dump.open(run))
    assert table.missing == {
        "batch": "column `linear_delta_batch` is NULL in every token outside "
        "(the optimizer takes its gradients in a closure)"
    }
    assert table.cause("update") == "other sequences of the batch + the optimizer"


def test_nothing_outside_is_no_error(run: Path) -> None:
    table = ladder_table(Dump.open(run), Question(threshold=1e6))
    assert table.tokens() == 0
    assert math.isnan(table.right("realized", "ratio").value) or not table.rungs
    assert "0 tokens outside" in str(table)


def test_own_protocol_is_refused(run: Path) -> None:
    with pytest.raises(QuestionError, match="follows one update"):
        ladder_table(Dump.open(run), Question(protocol="own"))
    assert ladder_table(Dump.open(run), Question(protocol="shared:ratio")).arm == "ratio"


def test_infinite_values_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    from deltad.dumps import DumpError

    run = make_dump(tmp_path / "run", ranks=1, parts=1)

    def spoil(found: pa.Table) -> pa.Table:
        at = found.schema.get_field_index("delta_triple")
        values = found.column(at).to_numpy().copy()
        values[2] = np.inf
        return found.set_column(at, found.schema.field(at), pa.array(values, pa.float32()))

    edit(part_files(run)[0], spoil)
    with pytest.raises(DumpError, match="row 2, column `delta_triple`: must be finite, found inf"):
        ladder_table(Dump.open(run))


def test_forms_hold_the_same_numbers(table: LadderTable) -> None:
    columns = table.to_dict()
    assert list(columns) == [each.name for each in LADDER_TABLE_COLUMNS]
    assert {len(values) for values in columns.values()} == {len(RUNGS) * 2 * 4}
    found = table.to_json_object()
    for rung in found["rungs"]:
        for within in SETS:
            for name, numbers in rung[within]["criteria"].items():
                at = next(
                    i
                    for i in range(len(columns["rung"]))
                    if (columns["rung"][i], columns["set"][i], columns["criterion"][i])
                    == (rung["rung"], within, name)
                )
                assert numbers["share"] == columns["share"][at]
                assert numbers["cost_ci95"] == [columns["cost_low"][at], columns["cost_high"][at]]
                assert rung[within]["agreement"] == columns["agreement"][at]
    assert found["recorded"] == LADDER
    text = " ".join(str(table).split())
    for words in ("Measured: own by gradients; update by jvp.", "a sampled token counts for those"):
        assert words in text


def test_a_rule_of_the_users_is_judged_next_to_the_others(run: Path, table: LadderTable) -> None:
    mine = Rule("mine", push="kl-exact")
    found = ladder_table(Dump.open(run), criteria=[mine])
    assert found.criteria == (*PAIR, "mine")
    ours = found.right("own", "mine")
    theirs = table.right("own", "predictive-kl-exact")
    assert (ours.part, ours.whole) == (theirs.part, theirs.whole)


def test_unlike_weights_multiply_those_of_the_sample(tmp_path: Path) -> None:
    def weigh(arm: str, seed: int, columns: Any) -> None:
        columns["weight"] = (1 + columns["sequence"] % 3).astype(np.float32)

    options: dict[str, Any] = {"rows": 150, "drift": 1.5, "metadata": {"ladder": LADDER}}
    table = ladder_table(Dump.open(make_dump(tmp_path / "run", change=weigh, **options)))
    rates = rate_table(Dump.open(tmp_path / "run")).pair
    assert rates.weighted
    base = table.increase("realized")
    assert (base.part, base.whole) == (rates.outside.increases.part, rates.outside.increases.whole)
    right = table.right("realized", "ratio", "disagreement")
    assert right.value == rates.accuracy("baseline", "disagreement").value
    assert table.tokens() == rates.outside.tokens
    assert table.tokens() < base.whole
    seed = table.seeds[0]
    known = seed.grows[1] != -1
    for kind in (seed.disagreement, ~seed.disagreement):
        stands_for = kind.sum() / (kind & known).sum()
        expected = (seed.weight * stands_for)[kind & known]
        np.testing.assert_allclose(seed.sampled_weight[kind & known], expected)
    alike = make_dump(tmp_path / "alike", change=lambda arm, seed, columns: columns.update(
        weight=np.full(len(columns["step"]), 4, np.float32)), **options)  # fmt: skip
    assert ladder_table(Dump.open(alike)).increase("realized").whole < base.whole


def test_an_unknown_way_of_sampling_is_said(tmp_path: Path) -> None:
    other = {**LADDER, "criterion": "nobody-knows"}
    run = make_dump(tmp_path / "run", rows=150, drift=1.5, metadata={"ladder": other})
    table = ladder_table(Dump.open(run))
    assert "there is no criterion 'nobody-knows'" in table.alike
    assert "so a sampled token counts for any" in " ".join(str(table).split())
