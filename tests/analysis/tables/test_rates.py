"""Rate tables against an independent count, and the laws of their numbers."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.analysis import (
    Question,
    QuestionError,
    RateTable,
    TokenTable,
    compare,
    condition_table,
    protocol_table,
    rate_table,
)
from deltad.dumps import Dump
from deltad.masks import RULES, Rule
from tests.analysis.bruteforce import (
    Tokens,
    assert_same,
    brute_keep_effect,
    brute_pair,
    every,
    judge_rows,
    unlike,
)
from tests.analysis.random_dumps import FAR, OWN, dumps, write
from tests.dumps.factory import edit, edit_metadata, make_dump

SIDES = ("criterion", "baseline")
KL = tuple(name for name in RULES if "-tv-" not in name)
TV = tuple(name for name in RULES if "-kl-" not in name)


def row(result: Any, at: int = 0) -> dict[str, Any]:
    """A row of a result by column."""
    return {name: values[at] for name, values in result.to_dict().items()}


def check(dump: Dump, table: RateTable) -> None:
    """A table's seeds, summary and keep effect are those of the brute force."""
    question = table.question
    names, own = question.names, question.protocol == "own"
    asked: dict[str, Any] = {"family": question.divergence, "threshold": question.threshold}

    def arm(name: str) -> Tokens:
        return judge_rows(Path(str(dump.path)), name, names, own=OWN, **asked)

    shared = question.protocol.removeprefix("shared:")
    ours, theirs = (arm(names[at] if own else shared) for at in (0, 1))
    weighted = unlike(ours, theirs)
    assert table.weighted == weighted
    for at, seed in enumerate(table.seeds):
        expected = brute_pair({seed: ours[seed]}, {seed: theirs[seed]}, *names, weighted=weighted)
        found = row(table, at)
        assert_same(found, {name: value for name, value in expected.items() if name in found})
        assert found["seed"] == seed
    summary = table.to_json_object()["summary"]
    whole = brute_pair(ours, theirs, *names, weighted=weighted)
    for side in SIDES:
        for name in ("unsafe_keep_rate", "contracting_fraction"):
            assert_same(summary[side], {name: whole[f"{side}_{name}"]})
    for name, base in summary["base"].items():
        for key in ("undetermined", "increase_rate"):
            assert_same(base, {key: whole[f"{name}_{key}"]})
        assert base["tokens"] == whole[name]
    paired = {name: whole[name] for name in ("lower", "tied", "higher", "difference")}
    assert_same(summary["paired"], {**paired, "sign_test_p": whole["sign_test_p"]})
    for side, tokens, mine, other in zip(SIDES, (ours, theirs), names, names[::-1], strict=True):
        kept = [t.delta_d for t in every(tokens) if t.outside and t.kept(mine) > t.kept(other)]
        np.testing.assert_allclose(np.sort(table.delta_d[side]), sorted(kept), 1e-9, 1e-9)
    if table.keep_effect is not None:
        applied, against = (arm(name) for name in names)
        effect = brute_keep_effect(applied, against, *names, weighted=unlike(applied, against))
        assert_same(summary["keep_effect"], effect)


@given(
    dump=dumps(),
    family=st.sampled_from(["kl", "tv"]),
    pick=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    recompute=st.booleans(),
)
def test_a_table_counts_as_the_brute_force_does_on_any_dump(
    dump: dict[str, Any], family: str, pick: tuple[int, int], recompute: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = write(Path(folder) / "run", **dump)
        rules: tuple[str | Rule, ...] = (*(KL if family == "kl" else TV), FAR)
        pair = [rules[each % len(rules)] for each in pick]
        asked = Question(dump["threshold"], family, pair[0], pair[1], "shared:none")
        check(made, rate_table(made, asked, recompute=recompute))
        applied = Question(dump["threshold"], protocol="own")
        for question in (applied, replace(applied, criterion="ratio", baseline="none")):
            protocols = protocol_table(made, question, recompute=recompute)
            assert [each.question.protocol for each in protocols.tables][:2] == [
                "shared:none", "own"
            ]  # fmt: skip
            assert not protocols.refused
            for table in protocols.tables:
                assert table.keep_effect is not None
                check(made, table)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump in which every pair of rules disagrees about many tokens."""
    return write(
        tmp_path_factory.mktemp("rates") / "run", seeds=(0, 1, 5), rows=150, ranks=1, top_k=3,
        vocab_size=30, drift=1.5, null_vectors=0.1, threshold=0.1,
        arms=("none", "ratio", "predictive-kl-aggregated", "zero-step"),
    )  # fmt: skip


def test_the_protocol_table_is_read_once_and_each_table_is_that_of_its_own(dump: Dump) -> None:
    seen: list[int] = []
    asked = Question(0.1)
    protocols = protocol_table(dump, asked, bootstrap_seed=7, progress=seen.append)
    named = [each.question.protocol for each in protocols.tables]
    assert named == ["shared:none", "own", "shared:predictive-kl-aggregated", "shared:ratio"]
    assert sum(seen) == sum(part.rows for part in dump.parts if part.arm != "zero-step")
    for table in protocols.tables:
        alone = rate_table(dump, replace(asked, protocol=table.question.protocol), bootstrap_seed=7)
        assert alone.to_json_object() == table.to_json_object()
    refused = protocol_table(dump, Question(0.1, criterion="binary-kl")).refused
    assert list(refused) == ["own"]


def test_the_bootstrap_seed_moves_intervals_alone(dump: Dump) -> None:
    first, second = (rate_table(dump, bootstrap_seed=seed).to_json_object() for seed in (1, 2))
    assert first["seeds"] == second["seeds"]
    assert first["summary"]["bootstrap"] == {**second["summary"]["bootstrap"], "seed": 1}
    assert first["summary"]["paired"]["sign_test_p"] == second["summary"]["paired"]["sign_test_p"]


def test_alike_weights_change_nothing_and_a_keep_effect_has_the_errors_of_both_arms(
    tmp_path: Path,
) -> None:
    found = []
    for weight in (1.0, 3.0):

        def alike(arm: str, seed: int, columns: Any, weight: float = weight) -> None:
            columns["weight"] = np.full(len(columns["step"]), weight, np.float32)
            columns["delta_d_noise"] = np.full(len(columns["step"]), 0.05)

        run = make_dump(
            tmp_path / str(weight), change=alike, rows=400, drift=1.5, threshold=0.1, ranks=1
        )
        table = rate_table(Dump.open(run), Question(0.1))
        check(Dump.open(run), table)
        found.append(table.to_json_object())
    assert found[0] == found[1]
    effect = found[0]["summary"]["keep_effect"]
    assert 0 < effect["undetermined"] < effect["tokens"]


def test_a_random_share_of_sequences_is_said(tmp_path: Path) -> None:
    sampling = {"sequences": 0.25, "every": 1, "seed": 0}
    table = rate_table(write(tmp_path / "run", metadata={"sampling": sampling}))
    assert table.share == 0.25
    assert "a random 0.25 of the sequences" in " ".join(table.text().split())


def only(chosen: pa.Array, table: pa.Table) -> pa.Table:
    """Some rows."""
    return table.filter(chosen)


def test_disagreement_tokens_alone_answer_for_their_pair(tmp_path: Path) -> None:
    whole = write(tmp_path / "run", rows=150, drift=1.5, ranks=1, parts=1)
    expected = rate_table(whole)
    for part in whole.parts:
        asked = Question(protocol=f"shared:{part.arm}")
        rows = TokenTable(whole, asked, seeds=[part.seed]).to_frame()
        edit(part.path, partial(only, pa.array(rows["disagreement"].tolist())))
        stored = {"rule": "disagreement", "divergence": "kl", "threshold": 0.15,
                  "criterion": "predictive-kl-aggregated", "baseline": "ratio",
                  "outside": int(rows["outside"].sum())}  # fmt: skip
        edit_metadata(part.path, stored=stored)
    dump = Dump.open(whole.path)
    table = rate_table(dump)
    for name, counts in table.sets.items():
        if name != "outside" and not name.endswith("_right"):
            assert np.array_equal(counts, expected.sets[name]), name
    assert table.outside.tokens == expected.outside.tokens
    base = table.to_json_object()["summary"]["base"]["outside"]
    assert base == {"tokens": table.outside.tokens, "undetermined": None, "increase_rate": None}
    assert table.keep_effect is not None
    assert expected.keep_effect is not None
    assert table.keep_effect.to_json_object() == expected.keep_effect.to_json_object()
    assert "Only the disagreement tokens were stored" in " ".join(table.text().split())
    with pytest.raises(QuestionError, match=r"at kl 0\.2"):
        rate_table(dump, Question(0.2))
    with pytest.raises(QuestionError, match="needs every token outside"):
        condition_table(dump)


def test_a_dump_without_post_or_pre_has_no_table(tmp_path: Path) -> None:
    with pytest.raises(QuestionError, match="ΔD needs the policy's log-probs after the update"):
        rate_table(write(tmp_path / "run", post=False, rows=20))


def test_of_tokens_outside_that_a_rate_table_did_not_keep_no_accuracy_is_claimed() -> None:
    dump = Dump.open(Path(__file__).parents[3] / "data_dumps" / "tiny-whole")
    table, compared = rate_table(dump), compare(dump)
    name, _ = table.question.names
    assert math.isnan(table.accuracy("criterion").value)
    ours, theirs = table.accuracy("criterion", "disagreement"), compared[name].disagreement
    assert (ours.part, ours.whole) == (theirs.part, theirs.whole)
