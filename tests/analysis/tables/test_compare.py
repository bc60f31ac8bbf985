"""Sweeps, comparisons and condition tables, row by row against an independent count."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.analysis import (
    CONDITIONS,
    ConditionTable,
    Question,
    QuestionError,
    compare,
    condition_table,
    sweep,
)
from deltad.dumps import Dump
from deltad.masks import RULES, CriterionError
from tests.analysis.bruteforce import (
    Token,
    Tokens,
    assert_same,
    brute_accuracy,
    brute_masked,
    brute_pair,
    every,
    hidden,
    judge_rows,
    log_ratio_of,
    unlike,
)
from tests.analysis.random_dumps import ARMS, CLASSES, FAR, OWN, WORDS, dumps, write

DUMPS = Path(__file__).parents[3] / "data_dumps"
RICH: dict[str, Any] = {
    "seeds": (0, 1, 2, 5), "rows": 150, "ranks": 1, "parts": 1, "top_k": 6, "vocab_size": 30,
    "drift": 1.5, "null_vectors": 0.1, "threshold": 0.1, "arms": ARMS,
}  # fmt: skip


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump in which all rules disagree about many tokens."""
    return write(tmp_path_factory.mktemp("compare") / "run", **RICH)


def rows_of(result: Any) -> list[dict[str, Any]]:
    """The rows of a result by column."""
    columns = result.to_dict()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def judged(dump: Dump, arm: str, asked: Question, names: Any, **how: Any) -> Tokens:
    """An arm's rows, judged by loops."""
    path = Path(str(dump.path))
    return judge_rows(path, arm, names, asked.divergence, asked.threshold, own=OWN, **how)


def outside(tokens: Tokens) -> list[Token]:
    """The tokens outside."""
    return [token for token in every(tokens) if token.outside]


def apart(tokens: list[Token], one: str, other: str) -> list[Token]:
    """Those that exactly one of two rules masks."""
    return [token for token in tokens if token.kept(one) != token.kept(other)]


def check_comparison(dump: Dump, asked: Question, **how: Any) -> None:
    """Every number of a comparison under `shared:none`."""
    names = [n for n, r in RULES.items() if r.family in (None, asked.divergence) and n != "none"]
    found = compare(dump, asked, [*names, FAR], **how)
    base = asked.names[1]
    assert found.names == (base, *(name for name in [*names, FAR.name] if name != base))
    tokens = judged(dump, "none", asked, found.names)
    out, weighted, known = outside(tokens), unlike(tokens), not hidden(tokens)
    assert found.stored == len(every(tokens))
    for at, row in enumerate(rows_of(found)):
        name = row["criterion"]
        expected = brute_pair(tokens, tokens, name, base, weighted=weighted)
        expected |= brute_masked(tokens, name)
        expected |= brute_accuracy("outside", out, name, weighted=weighted, known=known)
        differ = apart(out, name, base)
        expected |= brute_accuracy("disagreement", differ, name, weighted=weighted)
        assert_same(row, expected, name)
        alike = [len(out) - len(apart(out, name, other)) for other in found.names]
        assert found.alike[at].tolist() == alike


def check_sweep(dump: Dump, asked: Question, over: str, values: Any = (), **how: Any) -> None:
    """Every number of a sweep."""
    found = sweep(dump, asked, over=over, values=values, **how)
    names = asked.names
    points = []
    for row in rows_of(found):
        value, arms, more, question = row["value"], ["none", "none"], {}, asked
        if over == "protocol":
            arms = list(names) if value == "own" else [value.removeprefix("shared:")] * 2
        elif over == "top-k":
            more = {"top_k": value}
        else:
            question = replace(asked, threshold=value)
        points.append((row, [judged(dump, arm, question, names, **more) for arm in arms]))
    assert points
    weighted = unlike(*(arm for _, arms in points for arm in arms))
    for row, (ours, theirs) in points:
        expected = brute_pair(ours, theirs, *names, weighted=weighted)
        if row["value"] != "own":
            for side, name in zip(("criterion", "baseline"), names, strict=True):
                expected |= brute_accuracy(
                    side, outside(ours), name, weighted=weighted, known=not hidden(ours)
                )
        assert_same(row, expected, row["value"])


def state_of(tokens: Tokens) -> Callable[[Token], str]:
    """Whether some other response of a token's group begins with the same tokens."""
    responses: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    home = {id(token): seed for seed, some in tokens.items() for token in some}
    for t in sorted(every(tokens), key=lambda t: t.key):
        group = responses.setdefault((home[id(t)], t.row["step"], t.row["group"]), {})
        group.setdefault(t.row["sequence"], []).append(t.row["token_id"])

    def state(t: Token) -> str:
        group = responses[home[id(t)], t.row["step"], t.row["group"]]
        begun = group[t.row["sequence"]][: t.row["position"]]
        others = [group[each][: len(begun)] for each in group if each != t.row["sequence"]]
        return "shared" if begun in others or not begun else "own"

    return state


VALUES: dict[str, Callable[[Token], Any]] = {
    "position": lambda t: t.row["position"],
    "entropy": lambda t: t.row["pre_entropy"],
    "divergence": lambda t: t.d_pre,
    "ratio": lambda t: abs(math.expm1(log_ratio_of(t.row))),
    "advantage": lambda t: ("zero", "positive", "negative")[
        (t.row["advantage"] > 0) - (t.row["advantage"] < 0)
    ],
    "token": lambda t: CLASSES[t.row["token_id"] % len(WORDS)],
    "tail": lambda t: t.pair.mu_t if t.pair else math.nan,
}


def in_bin(value: Callable[[Token], Any], row: dict[str, Any], token: Token) -> bool:
    """Whether a token's value lies in the bin of a row; sums are taken in another order here."""
    mine, low, high = value(token), row["low"], row["high"]
    if math.isnan(low):
        return bool(mine == row["bin"])
    at_low, at_high = (math.isclose(mine, end, rel_tol=1e-12, abs_tol=1e-12) for end in (low, high))
    above = at_low if row["bin"][0] != "(" and at_low else mine > low and not at_low
    return bool(above and (mine < high or at_high))


def check_conditions(dump: Dump, asked: Question, by: list[str], bins: int, **how: Any) -> None:
    """Every number of a condition table under `shared:none`."""
    found = condition_table(dump, asked, by, [asked.criterion, FAR], bins=bins, **how)
    tokens = judged(dump, "none", asked, found.criteria)
    out, weighted, known = outside(tokens), unlike(tokens), not hidden(tokens)
    values = {**VALUES, "state": state_of(tokens)}
    for row in rows_of(found):
        chosen = partial(in_bin, values[row["condition"]], row)
        name = row["criterion"]
        some = [token for token in out if chosen(token)]
        expected = brute_pair(
            tokens, tokens, name, asked.names[1], weighted=weighted, chosen=chosen
        )
        expected |= brute_accuracy("outside", some, name, weighted=weighted, known=known)
        assert_same(row, expected, (row["condition"], row["bin"], name))
    if known:
        for name in by:
            parts = found.of(name, found.criteria[0])
            assert sum(part.pair.outside.tokens or 0 for part in parts) == len(out)


@given(
    dump=dumps(post=False),
    pick=st.integers(0, 999),
    family=st.sampled_from(["kl", "tv"]),
    bins=st.integers(1, 5),
    recompute=st.booleans(),
)
def test_every_table_counts_as_the_brute_force_does_on_any_dump(
    dump: dict[str, Any], pick: int, family: str, bins: int, recompute: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = write(Path(folder) / "run", **dump)
        names = [*RULES]
        one, other = names[pick % len(names)], names[pick // len(names) % len(names)]
        families = {RULES[each].family for each in (one, other)} - {None}
        if families <= {family}:
            asked = Question(dump["threshold"], family, one, other, "shared:none")
        else:
            one, other = f"predictive-{family}-aggregated", "clip-higher"
            asked = Question(dump["threshold"], family, one, other, "shared:none")
        how = {"recompute": recompute}
        check_comparison(made, asked, **how)
        check_sweep(made, asked, "threshold", [0.0, dump["threshold"], 0.3], **how)
        check_sweep(made, asked, "top-k", [1, made.top_k], **how)
        check_sweep(made, replace(asked, criterion=other, baseline=one), "protocol",
                    ["shared:ratio", "shared:zero-step"], **how)  # fmt: skip
        check_sweep(made, Question(dump["threshold"]), "protocol", **how)  # `own`, too
        if "post" in made.readings("none"):
            by = [name for name in CONDITIONS if name != "tail"]
            check_conditions(made, asked, by, bins, **how)
        else:
            with pytest.raises(QuestionError, match="ΔD needs"):
                condition_table(made, asked)


@pytest.mark.parametrize("family", ["kl", "tv"])
def test_many_tokens_are_decided_differently(dump: Dump, family: str) -> None:
    asked = Question(0.1, family, protocol="shared:none")
    check_comparison(dump, asked)
    found = compare(dump, asked)
    assert len(found.names) == 15
    for each in found.rows[1:]:
        assert (each.pair.disagreement.tokens or 0) > 0
    inside = {each.name: each.masked["inside"] for each in found.rows}
    assert inside["ratio"] == 0
    assert inside["clip-higher"] > 0
    assert found["clip-higher"].masked["without_topk"] > 0


def test_every_condition_is_counted_where_it_has_many_values(dump: Dump) -> None:
    check_conditions(dump, Question(0.1, protocol="shared:none"), ["entropy", "position"], 3)
    found = condition_table(dump, Question(0.1), bins=3)
    assert {each.name for each in found.conditions} == set(CONDITIONS)
    for name in ("entropy", "divergence", "ratio"):
        assert len(found.of(name, "ratio")) == 3
    labels = [part.label for part in found.of("token", "ratio")]
    assert labels == [
        "digit", "word", "whitespace", "punctuation", "special", "other", "unknown"
    ]  # fmt: skip


def test_what_a_thinned_dump_cannot_answer_is_refused_and_the_rest_is_shown(
    tmp_path: Path,
) -> None:
    options = {**RICH, "arms": ("none",), "null_vectors": 0.0}
    whole = write(tmp_path / "whole", **options)
    thin = write(tmp_path / "thin", stored=("kl", 0.1), **options)
    found = sweep(thin, values=[0.02, 0.1, 0.3])
    assert list(found.refused) == ["0.02"]
    assert "0.02 is left out" in str(found)
    # D on fewer ids is smaller: what is outside there is stored.
    for over, values in (("threshold", [0.1, 0.3]), ("top-k", [])):
        ours, theirs = (sweep(each, over=over, values=values) for each in (thin, whole))
        assert repr(ours.to_dict()) == repr(theirs.to_dict())
    with pytest.raises(QuestionError, match=r"no threshold.*at 0\.02:.*stores only"):
        sweep(thin, values=[0.02])
    table = condition_table(thin, by=["state"])
    own, shared, unknown = table.of("state", "ratio")
    assert (own.pair.outside.tokens, unknown.label) == (0, "unknown")
    assert (shared.pair.outside.tokens or 0) > 0
    assert "does not hold whole responses" in " ".join(str(table).split())
    refused = compare(thin).refused
    assert refused.keys() == {"sequence_mask", "sequence_truncate"}
    assert "judges whole responses" in refused["sequence_mask"]


def test_own_judges_no_sign_and_needs_an_arm_for_each_criterion(dump: Dump) -> None:
    asked = Question(0.1, protocol="own")
    found = compare(dump, asked)
    assert found.names == ("ratio", "predictive-kl-aggregated")
    assert {"icepop", "predictive-kl-exact"} <= found.refused.keys()
    assert all(math.isnan(each.outside.value) for each in found.rows)
    assert "no sign is judged" in " ".join(str(found).split())
    assert [point.value for point in sweep(dump, asked).rows] == [0.1]


def test_holm_corrects_for_the_criteria_that_differ(dump: Dump) -> None:
    found = compare(dump, Question(0.1))
    plain = [each.pair.paired.sign_test_p for each in found.rows]
    tested = [p for p in plain if not math.isnan(p)]
    assert 2 <= len(tested) < len(plain)
    corrected = [each.holm_p for each in found.rows if not math.isnan(each.holm_p)]
    assert min(corrected) == pytest.approx(min(1.0, len(tested) * min(tested)))


def test_what_the_dump_lacks_is_left_out_by_default_and_refused_by_name(tmp_path: Path) -> None:
    dump = write(tmp_path / "run", arms=("none",), optional=("delta_d_noise",))
    found = compare(dump)
    assert found.refused.keys() == {"predictive-kl-exact", "predictive-kl-full"}
    assert "`pre_collision`" in found.refused["predictive-kl-exact"]
    for asked, error, words in (
        ("predictive-kl-full", QuestionError, "full_kl_pre"),
        ("predictive-tv-exact", CriterionError, "predictive-kl-exact"),
        ("ppo", CriterionError, "no criterion 'ppo'"),
    ):
        with pytest.raises(error, match=words):
            compare(dump, criteria=[asked])
    with pytest.raises(QuestionError, match="`entropy` needs the column `pre_entropy`"):
        condition_table(dump, by=["entropy"])


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda d: sweep(d, over="time"), "one of threshold, top-k, protocol, got 'time'"),
        (lambda d: sweep(d, values=["low"]), "must be a number, got 'low'"),
        (lambda d: sweep(d, values=[-1]), "not negative"),
        (lambda d: sweep(d, over="top-k", values=[0]), "from 1 to the dump's K = 6, got 0"),
        (lambda d: sweep(d, over="top-k", values=[7]), "from 1 to the dump's K = 6, got 7"),
        (lambda d: sweep(d, over="top-k", values=["2.5"]), "whole number"),
        (lambda d: sweep(d, over="protocol", values=["both"]), "`protocol` must be"),
        (lambda d: sweep(d, over="protocol", values=["shared:x"]), "no arm 'x'"),
        (lambda d: condition_table(d, bins=0), "`bins` must be at least 1, got 0"),
        (lambda d: condition_table(d, by=["size"]), "no condition 'size'"),
    ],
)
def test_nonsense_is_refused(dump: Dump, ask: Callable[[Dump], Any], words: str) -> None:
    with pytest.raises(QuestionError, match=words):
        ask(dump)


def test_tied_numbers_leave_fewer_bins_and_it_is_said(dump: Dump) -> None:
    table: ConditionTable = condition_table(dump, Question(0.1), ["position"], bins=9)
    assert len(table.of("position", "ratio")) == 5
    assert "position: 5 bins of the 9 asked for" in " ".join(str(table).split())


def test_golden_numbers_of_the_tiny_dump() -> None:
    dump = Dump.open(DUMPS / "tiny-whole")
    found = compare(dump, criteria=["predictive-kl-aggregated", "icepop", "mis"])
    assert {
        each.name: (
            sum(each.masked.values()),
            each.masked["inside"],
            each.outside.part,
            each.disagreement.part,
            each.disagreement.whole,
        )
        for each in found.rows
    } == {
        "ratio": (554, 0, 514, 0, 0),
        "predictive-kl-aggregated": (579, 0, 519, 31, 57),
        "icepop": (457, 38, 495, 151, 321),
        "mis": (111, 17, 416, 263, 624),
    }
    points = {
        point.value: (
            point.pair.outside.tokens,
            point.pair.disagreement.tokens,
            point.accuracy("criterion").part,
        )
        for over in ("threshold", "top-k")
        for point in sweep(dump, over=over).rows
    }
    assert points[0.02] == (1642, 82, 875)
    assert points[0.15] == points[20] == (954, 57, 519)
    assert points[5] == (496, 113, 278)
    table = condition_table(dump, by=["state", "token"])
    assert {
        part.label: (part.pair.outside.tokens, part.accuracy.part)
        for part in table.rows
        if part.pair.outside.tokens and part.criterion == "predictive-kl-aggregated"
    } == {"own": (142, 76), "shared": (812, 443), "digit": (951, 517), "punctuation": (3, 2)}
