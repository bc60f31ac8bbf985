from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.doctor import FAULTS, Fault, NothingToBreakError, write_injected
from benchmarks.doctor.broken import read_rows
from benchmarks.doctor.rows import Rows, Slots, Tail
from deltad.analysis.doctor.diagnosis import CAUSES
from deltad.divergence import kl
from deltad.dumps import KEY, Batch, Dump, Metadata, batch_support, check_batch, check_dump
from deltad.masks import CRITERIA
from tests.dumps.factory import make_dump

DUMPS = Path(__file__).parents[2] / "data_dumps"
SOUND = [name for name, each in FAULTS.items() if each.cause is None]
BROKEN = [name for name in FAULTS if name not in SOUND]
Columns = dict[str, NDArray[Any]]

LEGAL = (
    "temperature-behavior", "temperature-policy", "top-p", "top-p-absent", "top-p-raw", "top-k",
    "min-p", "policy-on-support", "shift", "shift-start", "minus-9999-row", "recomputed", "stale",
    "other-model", "other-context", "weaker-model", "permuted-ids", "offset-ids", "replaced-last",
    "left-out", "behavior-noise", "engine-noise", "outliers", "drift-by-position",
    "rounded-logits", "zero-advantage", "constant-advantage", "raw-rewards", "unsigned-advantage",
    "concentrated",
)  # fmt: skip
"""Faults that leave values which the contract allows: only a doctor can find them."""


@lru_cache
def clean(name: str, arm: str = "none") -> tuple[Columns, Metadata]:
    """Rows of a dump's first seed, in order."""
    columns, metadata = read_rows(Dump.open(DUMPS / name), arm, 0)
    order = np.lexsort(tuple(columns[key] for key in reversed(KEY)))
    return {key: values[order] for key, values in columns.items()}, metadata


def injected(
    name: str, strength: float, dump: str = "tiny-whole", arm: str = "none", seed: int = 3
) -> tuple[Columns, Metadata]:
    columns, metadata = clean(dump, arm)
    return FAULTS[name].apply(columns, metadata, strength, np.random.default_rng(seed))


def batch(columns: Columns) -> Batch:
    return Batch("file", 0, columns, np.asarray((columns["topk_ids"] >= 0).any(axis=1)))


def rows_of(columns: Columns, metadata: Metadata) -> Rows:
    return Rows(columns, metadata, np.random.default_rng(0))


def log_mass(columns: Columns, metadata: Metadata, side: str) -> NDArray[np.float64]:
    """Mass of S, with the sampled token where it is not listed."""
    slots = Slots(rows_of(columns, metadata))
    return np.asarray(np.exp(slots.logs(side)).sum(axis=1))


@pytest.mark.parametrize("dump", ["smollm2"])
def test_an_injection_leaves_its_inputs_alone_and_depends_on_the_seed_alone(dump: str) -> None:
    columns, metadata = clean(dump)
    before = {name: values.copy() for name, values in columns.items()}
    for name in columns:
        columns[name].setflags(write=False)
    for each in FAULTS.values():
        try:
            one, two = (
                each.apply(columns, metadata, each.strengths[0], np.random.default_rng(5))
                for _ in range(2)
            )
        except NothingToBreakError:
            continue
        assert one[1] == two[1], each.name
        for name in one[0]:
            np.testing.assert_array_equal(one[0][name], two[0][name], err_msg=each.name)
    for name, values in before.items():
        np.testing.assert_array_equal(columns[name], values)


def test_an_injection_does_not_depend_on_the_order_of_rows() -> None:
    columns, metadata = clean("tiny-whole")
    order = np.random.default_rng(0).permutation(len(columns["step"]))
    mixed = {name: values[order] for name, values in columns.items()}
    for name in ("shift", "other-model", "zero-row", "top-p"):
        each, strength = FAULTS[name], FAULTS[name].strengths[0]
        one, _ = each.apply(columns, metadata, strength, np.random.default_rng(1))
        two, _ = each.apply(mixed, metadata, strength, np.random.default_rng(1))
        for column in one:
            np.testing.assert_array_equal(one[column], two[column], err_msg=name)


@pytest.mark.parametrize("name", BROKEN)
def test_every_strength_of_a_fault_changes_something_the_doctor_can_see(name: str) -> None:
    columns, _ = clean("smollm2-whole", "ratio")
    for strength in FAULTS[name].strengths:
        changed, metadata = injected(name, strength, "smollm2-whole", "ratio")
        assert changed["topk_ids"].shape[1] == metadata.top_k
        assert any(
            values.shape != columns[column].shape
            or not np.array_equal(values, columns[column], equal_nan=values.dtype.kind == "f")
            for column, values in changed.items()
            if column not in ("post_logprob", "topk_post_logprobs", "post_collision")
            and values.dtype != object
        ), strength


@pytest.mark.parametrize(
    ("dump", "place"), [("tiny-whole", -1), ("tiny", 0), ("smollm2", -1), ("smollm2", 0)]
)
def test_a_fault_of_meaning_leaves_values_that_the_contract_allows(dump: str, place: int) -> None:
    for name in LEGAL:
        for strength in (FAULTS[name].strengths[place],):
            try:
                columns, metadata = injected(name, strength, dump, "ratio")
            except NothingToBreakError:
                assert name in ("replaced-last", "shift", "shift-start", "rolled"), (
                    "these need certain rows"
                )
                continue
            check_batch(batch(columns), metadata)


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_injected(
        DUMPS / "smollm2", tmp_path_factory.mktemp("one") / "run", "untouched",
        arms=["none", "ratio"], seeds=[1],
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    sorted(
        set(BROKEN)
        - set(LEGAL)
        - {
            "divided-logprobs",
            "minus-9999-rest",
            "minus-9999-unlikely",
            "rounded-logprobs",
        }  # now and then refused
    ),
)
def test_a_fault_of_values_is_one_that_a_check_refuses(
    name: str, one_seed: Path, tmp_path: Path
) -> None:
    write_injected(one_seed, tmp_path / "run", name, arms=["ratio"])
    assert check_dump(tmp_path / "run", strict=False)


@pytest.mark.parametrize("name", SOUND)
def test_a_control_leaves_a_dump_that_check_finds_in_order(
    name: str, one_seed: Path, tmp_path: Path
) -> None:
    for strength in FAULTS[name].strengths:
        out = tmp_path / f"{strength}"
        write_injected(one_seed, out, name, strength)
        assert check_dump(out, strict=False) == []


@pytest.mark.parametrize("tau", FAULTS["temperature-policy"].strengths)
@pytest.mark.parametrize("name", ["temperature-behavior", "temperature-policy"])
def test_a_temperature_is_the_slope_that_an_exact_fit_recovers(name: str, tau: float) -> None:
    columns, metadata = clean("tiny-whole")
    same = {
        **columns,
        "topk_pre_logprobs": columns["topk_behavior_logprobs"],
        "pre_logprob": columns["behavior_logprob"],
    }
    changed, _ = FAULTS[name].apply(same, metadata, tau, np.random.default_rng(0))
    mu = changed["topk_behavior_logprobs"].astype(np.float64)
    pi = changed["topk_pre_logprobs"].astype(np.float64)
    mu, pi = mu - mu.mean(axis=1, keepdims=True), pi - pi.mean(axis=1, keepdims=True)
    assert (mu * pi).sum() / (mu * mu).sum() == pytest.approx(1 / tau, rel=1e-5)
    side = "behavior" if name == "temperature-behavior" else "pre"
    listed = (changed["topk_ids"] == changed["token_id"][:, None]).any(axis=1)
    entry = np.where(
        changed["topk_ids"] == changed["token_id"][:, None],
        changed[f"topk_{side}_logprobs"],
        0,
    ).sum(axis=1)
    np.testing.assert_allclose(entry[listed], changed[f"{side}_logprob"][listed], atol=1e-6)


def test_a_temperature_keeps_a_whole_vocabulary_at_mass_one() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 9)) * 3
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    columns: Columns = {
        "topk_ids": np.tile(np.arange(9, dtype=np.int32), (50, 1)),
        "token_id": np.zeros(50, np.int32),
        "topk_behavior_logprobs": logs,
        "behavior_logprob": logs[:, 0],
    }
    slots = Slots(rows_of(columns, Metadata(top_k=9, vocab_size=9)))
    known = slots.logs("behavior")
    got = slots.tempered(known, 0.6, slots.spread("behavior"))
    want = 0.6 * logits - np.log(np.exp(0.6 * logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got[:, :9], want, rtol=1e-9)


@pytest.mark.parametrize("exponent", [0.5, 0.8, 1.0, 1.5, 2.0])
def test_the_modelled_tail_is_that_of_a_log_normal_vocabulary(exponent: float) -> None:
    """Power sums of a real list of log-normal probabilities, of which the top 20 are known."""
    rng = np.random.default_rng(1)
    weights = np.exp(rng.normal(size=(200, 5_000)))
    weights[:, :20] = weights.max(axis=1, keepdims=True) * rng.uniform(1, 40, (200, 20))
    probs = weights / weights.sum(axis=1, keepdims=True)
    columns: Columns = {
        "topk_ids": np.tile(np.arange(20, dtype=np.int32), (200, 1)),
        "token_id": np.zeros(200, np.int32),
        "topk_pre_logprobs": np.log(probs[:, :20]),
        "pre_logprob": np.log(probs[:, 0]),
        "pre_collision": (probs**2).sum(axis=1),
    }
    slots = Slots(rows_of(columns, Metadata(top_k=20, vocab_size=5_000)))
    logs = slots.logs("pre")
    tail = Tail(slots, logs, slots.spread("pre"))
    want = (probs[:, 20:] ** exponent).sum(axis=1)
    np.testing.assert_allclose(tail.power(exponent), want, rtol=0.12)
    assert np.median(tail.power(exponent) / want) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    ("name", "strength"), [("top-p", 0.8), ("top-k", 5), ("min-p", 0.1), ("top-p-absent", 0.8)]
)
def test_a_truncated_behavior_is_renormalised_over_its_survivors(
    name: str, strength: float
) -> None:
    columns, metadata = clean("tiny-whole")
    changed, _ = injected(name, strength)
    assert log_mass(changed, metadata, "behavior") == pytest.approx(1, abs=1e-5)
    assert np.isfinite(changed["behavior_logprob"]).all(), "what was sampled has survived"
    survivors = np.isfinite(changed["topk_behavior_logprobs"])
    before = np.exp(columns["topk_behavior_logprobs"].astype(np.float64))
    count = survivors.sum(axis=1)
    prefix = np.arange(20)[None, :] < count[:, None]
    np.testing.assert_array_equal(survivors, prefix)
    offset = np.log(np.where(prefix, before, 0).sum(axis=1))
    wanted = np.where(prefix, columns["topk_behavior_logprobs"] - offset[:, None], 0)
    found = np.where(prefix, changed["topk_behavior_logprobs"], 0)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    if name.startswith("top-p"):
        kept = np.where(prefix, before, 0)
        assert (kept.sum(axis=1) >= 0.8 - 1e-6).all()
        assert (kept.sum(axis=1) - kept[np.arange(len(count)), count - 1] < 0.8).all()
    if name == "top-k":
        assert set(count) == {5}


def test_raw_logprobs_of_a_nucleus_are_untouched_but_never_sampled_from_beyond() -> None:
    columns, _ = clean("tiny-whole")
    changed, _ = injected("top-p-raw", 0.8)
    np.testing.assert_array_equal(
        changed["topk_behavior_logprobs"], columns["topk_behavior_logprobs"]
    )
    for rows, some in ((columns, True), (changed, False)):
        likelier = rows["topk_behavior_logprobs"] > rows["behavior_logprob"][:, None] + 1e-6
        above = np.where(likelier, np.exp(rows["topk_behavior_logprobs"]), 0).sum(axis=1)
        assert bool((above >= 0.8 + 1e-5).any()) is some


def test_the_support_of_a_policy_normalised_on_it_has_mass_one() -> None:
    changed, metadata = injected("policy-on-support", 1, "smollm2-whole")
    for side in ("pre", "post"):
        assert log_mass(changed, metadata, side) == pytest.approx(1, abs=1e-6)
    assert log_mass(changed, metadata, "behavior").mean() < 0.99


@pytest.mark.parametrize("d", [1, -1, 2, -2])
def test_a_shift_moves_the_policies_rows_by_d(d: int) -> None:
    columns, _ = clean("tiny-whole")
    changed, _ = injected("shift", d)
    rows = np.arange(len(columns["step"]))
    source = rows - d
    inside = (source >= 0) & (source < len(rows))
    source = np.clip(source, 0, len(rows) - 1)
    inside &= columns["sequence"][source] == columns["sequence"]
    assert inside.sum() > 300
    compared = 0
    for row in rows[inside][:200]:
        theirs = dict(
            zip(
                columns["topk_ids"][source[row]].tolist(),
                columns["topk_pre_logprobs"][source[row]].tolist(),
                strict=True,
            )
        )
        for token, value in zip(
            changed["topk_ids"][row].tolist(),
            changed["topk_pre_logprobs"][row].tolist(),
            strict=True,
        ):
            if token in theirs:
                assert value == theirs[token]
                compared += 1
    assert compared > 200
    np.testing.assert_array_equal(
        changed["pre_entropy"][inside], columns["pre_entropy"][source[inside]]
    )
    np.testing.assert_array_equal(
        changed["topk_behavior_logprobs"], columns["topk_behavior_logprobs"]
    )


@pytest.mark.parametrize("d", [1, -2])
def test_rolled_policies_are_those_of_the_row_d_before_slot_by_slot(d: int) -> None:
    columns, _ = clean("tiny-whole")
    changed, _ = injected("rolled", d)
    source = np.arange(len(columns["step"])) - d
    inside = (source >= 0) & (source < len(source))
    source = np.clip(source, 0, len(source) - 1)
    inside &= columns["sequence"][source] == columns["sequence"]
    assert inside.sum() > 300
    for name in ("pre_logprob", "topk_pre_logprobs", "topk_post_logprobs", "pre_entropy"):
        np.testing.assert_array_equal(changed[name][inside], columns[name][source[inside]])
    np.testing.assert_array_equal(np.sort(changed["pre_logprob"]), np.sort(columns["pre_logprob"]))
    shuffled, _ = injected("shuffled", 1)
    np.testing.assert_array_equal(np.sort(shuffled["pre_logprob"]), np.sort(columns["pre_logprob"]))
    assert (shuffled["pre_logprob"] != columns["pre_logprob"]).mean() > 0.9


def test_divided_logprobs_are_divided_and_nothing_else() -> None:
    columns, _ = clean("tiny-whole")
    changed, _ = injected("divided-logprobs", 0.5)
    for name in ("pre_logprob", "topk_pre_logprobs", "post_logprob"):
        np.testing.assert_array_equal(changed[name], 2 * columns[name])


def test_a_shift_at_the_start_touches_nothing_else() -> None:
    columns, _ = clean("tiny-whole")
    changed, _ = injected("shift-start", -1)
    moved = (changed["topk_pre_logprobs"] != columns["topk_pre_logprobs"]).any(axis=1)
    np.testing.assert_array_equal(moved, columns["position"] == 0)


def test_what_a_thinned_dump_holds_of_a_sequence_is_shifted_as_if_it_were_all() -> None:
    changed, metadata = injected("shift", 1, "smollm2")
    assert metadata.stored_above is not None
    check_batch(batch(changed), metadata)
    for sequence in np.unique(changed["sequence"]):
        for step in np.unique(changed["step"][changed["sequence"] == sequence]):
            mine = (changed["sequence"] == sequence) & (changed["step"] == step)
            assert (np.diff(changed["position"][mine]) > 0).all()


@pytest.mark.parametrize("share", [0.005, 0.05, 0.5, 1.0])
@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("zero-scalar", "behavior_logprob", 0.0),
        ("one-scalar", "behavior_logprob", 1.0),
        ("minus-100-scalar", "behavior_logprob", -100.0),
        ("minus-1e30-scalar", "behavior_logprob", np.float32(-1e30)),
        ("minus-9999-row", "behavior_logprob", -9999.0),
        ("minus-inf-row", "behavior_logprob", -np.inf),
        ("nan-row", "behavior_logprob", np.nan),
        ("zero-policy", "pre_logprob", 0.0),
        ("minus-inf-policy", "pre_logprob", -np.inf),
    ],
)
def test_a_sentinel_fills_the_share_of_rows(
    name: str, column: str, value: float, share: float
) -> None:
    columns, _ = clean("smollm2-whole")
    changed, _ = injected(name, share, "smollm2-whole")
    filled = ~np.isclose(changed[column], columns[column], equal_nan=True)
    rows = len(filled)
    possible = int((~(np.abs(columns[column] - value) < 0.01)).sum())
    assert filled.sum() == min(max(3, round(share * rows)), possible)
    np.testing.assert_array_equal(changed[column][filled], np.float32(value))
    if name.endswith(("-row", "inf-policy")):
        assert (
            np.isnan(changed[f"topk_{column}s"][filled])
            if np.isnan(value)
            else changed[f"topk_{column}s"][filled] == np.float32(value)
        ).all()
    if name.endswith("-scalar"):
        np.testing.assert_array_equal(changed[f"topk_{column}s"], columns[f"topk_{column}s"])


def test_the_rest_of_a_list_is_filled_but_for_the_sampled_token() -> None:
    changed, _ = injected("minus-9999-rest", 1.0)
    filled = changed["topk_behavior_logprobs"] == -9999
    assert filled.any(axis=1).mean() > 0.99
    assert not filled[:, :10].any(), "half of the list at least was given"
    assert not (filled & (changed["topk_ids"] == changed["token_id"][:, None])).any()


def test_a_recomputed_behavior_is_the_policy_to_the_bit() -> None:
    changed, _ = injected("recomputed", 1)
    np.testing.assert_array_equal(changed["behavior_logprob"], changed["pre_logprob"])
    np.testing.assert_array_equal(changed["topk_behavior_logprobs"], changed["topk_pre_logprobs"])
    scalar, _ = injected("recomputed-scalar", 1)
    np.testing.assert_array_equal(scalar["behavior_logprob"], scalar["pre_logprob"])
    columns, _ = clean("tiny-whole")
    np.testing.assert_array_equal(
        scalar["topk_behavior_logprobs"], columns["topk_behavior_logprobs"]
    )


def test_a_stale_behavior_is_further_off_the_later_the_step() -> None:
    columns, metadata = clean("smollm2-whole")
    changed, _ = injected("stale", 4, "smollm2-whole")
    old, new = (kl(batch_support(batch(rows), metadata)) for rows in (columns, changed))
    steps = np.unique(columns["step"])
    growth = [
        float(np.sqrt(np.median(new[mine]) / np.median(old[mine])))
        for mine in (columns["step"] == step for step in steps)
    ]
    # D grows with the square of 1 + c, where c = 4 at the last of five steps.
    for step, found in enumerate(growth):
        assert found == pytest.approx(1 + 4 * (step + 1) / len(steps), rel=0.25)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["permuted-ids", "offset-ids"])
def test_ids_mean_others_in_every_seed_alike(name: str, seed: int) -> None:
    columns, metadata = clean("tiny-whole")
    changed, _ = injected(name, 1, seed=seed)
    if name == "offset-ids":
        meaning = np.roll(np.arange(72), 1)
    else:
        fixed = np.random.default_rng(72)
        fixed.random(72)
        meaning = fixed.permutation(72)
    compared = 0
    for row in range(100):
        known = dict(
            zip(
                columns["topk_ids"][row].tolist(),
                columns["topk_pre_logprobs"][row].tolist(),
                strict=True,
            )
        )
        for token, value in zip(
            changed["topk_ids"][row].tolist(),
            changed["topk_pre_logprobs"][row].tolist(),
            strict=True,
        ):
            if int(meaning[token]) in known:
                assert value == known[int(meaning[token])]
                compared += 1
    assert compared > 100
    assert metadata.vocab_size == 72


def test_a_padded_vocabulary_lists_ids_beyond_the_vocabulary() -> None:
    changed, metadata = injected("padded-vocabulary", 0.5)
    beyond = changed["topk_ids"] >= metadata.vocab_size
    assert beyond.any(axis=1).mean() == pytest.approx(0.5, abs=0.01)
    assert (changed["token_id"] >= metadata.vocab_size).any()


def test_conventions_lay_lists_out_as_they_say() -> None:
    columns, metadata = clean("smollm2-whole")
    token, ids = columns["token_id"], columns["topk_ids"]
    outside = ~(ids == token[:, None]).any(axis=1)
    assert outside.sum() > 3

    twice, _ = injected("duplicated", 1, "smollm2-whole")
    listed = ~outside & (token != ids[:, -1])
    assert ((twice["topk_ids"] == token[:, None]).sum(axis=1)[listed] == 2).all()
    np.testing.assert_array_equal(twice["topk_ids"][listed][:, 1:], ids[listed][:, :-1])
    np.testing.assert_array_equal(
        twice["topk_pre_logprobs"][listed, 0], columns["pre_logprob"][listed]
    )

    first, _ = injected("sampled-first", 1, "smollm2-whole")
    later = token != ids[:, 0]
    np.testing.assert_array_equal(first["topk_ids"][later, 0], token[later])
    assert (np.diff(np.sort(first["topk_ids"], axis=1), axis=1) > 0).all(), "no id twice"

    replaced, _ = injected("replaced-last", 1, "smollm2-whole")
    np.testing.assert_array_equal(replaced["topk_ids"][outside, -1], token[outside])
    np.testing.assert_array_equal(replaced["topk_ids"][~outside], ids[~outside])

    longer, changed = injected("appended", 1, "smollm2-whole")
    assert changed.top_k == metadata.top_k + 1
    np.testing.assert_array_equal(longer["topk_ids"][:, -1], token)

    without, _ = injected("left-out", 1, "smollm2-whole")
    assert not (without["topk_ids"] == token[:, None]).any()
    assert (without["topk_ids"][~outside, -1] == -1).all(), "padding comes last"

    for name in ("out-of-order", "ascending"):
        mixed, _ = injected(name, 1, "smollm2-whole")
        assert (np.diff(mixed["topk_behavior_logprobs"], axis=1) > 0).any(axis=1).mean() > 0.9
        rows_of(mixed, metadata).rerank()
        np.testing.assert_array_equal(mixed["topk_pre_logprobs"], columns["topk_pre_logprobs"])


def test_engine_noise_has_the_size_that_it_says() -> None:
    columns, _ = clean("smollm2-whole")
    noisy, _ = injected("behavior-noise", 0.3, "smollm2-whole")
    assert np.std(noisy["behavior_logprob"] - columns["behavior_logprob"]) < 0.3
    assert (np.diff(noisy["topk_behavior_logprobs"], axis=1) <= 0).all(), "in rank order"
    for sigma in (0.04, 0.25):
        changed, metadata = injected("engine-noise", sigma, "smollm2-whole")
        gap = changed["topk_pre_logprobs"] - changed["topk_behavior_logprobs"]
        inner = gap - gap.mean(axis=1, keepdims=True)
        assert inner.std() == pytest.approx(sigma * np.sqrt(19 / 20), rel=0.03)
        assert metadata.behavior["precision"] == "float32"


def test_rounded_logits_lie_on_a_grid_and_rounded_logprobs_have_short_fractions() -> None:
    changed, _ = injected("rounded-logits", 30)
    gaps = np.diff(changed["topk_behavior_logprobs"][:, :4].astype(np.float64), axis=1)
    np.testing.assert_allclose(gaps * 16, np.round(gaps * 16), atol=1e-3)
    bf16, _ = injected("rounded-logprobs", 1)
    bits = bf16["topk_behavior_logprobs"].view(np.uint32)
    assert not (bits & 0xFFFF).any()
    columns, _ = clean("tiny-whole")
    error = bf16["behavior_logprob"] / columns["behavior_logprob"] - 1
    assert np.abs(error).max() <= 2**-8
    assert np.abs(error).max() > 2**-10
    half, _ = injected("rounded-logprobs", 2)
    stored = half["topk_behavior_logprobs"]
    np.testing.assert_array_equal(stored, stored.astype(np.float16))


def test_outliers_are_the_share_of_tokens_and_drift_grows_along_the_response() -> None:
    changed, metadata = injected("outliers", 0.05)
    gap = np.abs(changed["topk_pre_logprobs"] - changed["topk_behavior_logprobs"]).max(axis=1)
    assert (gap > 0.5).mean() == pytest.approx(0.05, abs=0.02)
    drifting, _ = injected("drift-by-position", 0.6, "smollm2-whole")
    gap = drifting["topk_pre_logprobs"] - drifting["topk_behavior_logprobs"]
    spread = [gap[drifting["position"] == place].std() for place in (0, 3, 8)]
    assert spread[0] < 0.05 < spread[1] < spread[2]
    assert metadata.behavior["precision"] == "bfloat16"


def test_advantages_are_what_they_say() -> None:
    columns, _ = clean("tiny-whole")
    assert not injected("zero-advantage", 0)[0]["advantage"].any()
    assert set(injected("constant-advantage", 1)[0]["advantage"]) == {1.0}
    raw = injected("raw-rewards", 10)[0]["advantage"]
    np.testing.assert_array_equal(raw, np.where(columns["advantage"] > 0, 10, 0))
    np.testing.assert_array_equal(
        injected("unsigned-advantage", 1)[0]["advantage"], np.abs(columns["advantage"])
    )
    nan = np.isnan(injected("nan-advantage", 0.3)[0]["advantage"])
    groups = [set(nan[columns["group"] == group]) for group in np.unique(columns["group"])]
    assert all(len(each) == 1 for each in groups)
    assert sum(True in each for each in groups) == round(0.3 * len(groups))


def test_a_concentrated_mask_hits_two_ids() -> None:
    changed, _ = injected("concentrated", 1, arm="ratio")
    dropped = changed["token_id"][~changed["in_loss"]]
    ids, counts = np.unique(dropped, return_counts=True)
    assert len(dropped) > 10
    assert np.sort(counts)[-2:].sum() / len(dropped) > 0.9
    assert len(ids) < 10


@pytest.mark.parametrize("arm", ["ratio", "predictive-kl-aggregated"])
@pytest.mark.parametrize("name", ["temperature-behavior", "recomputed", "other-model"])
def test_the_applied_mask_is_decided_on_the_faulty_numbers(name: str, arm: str) -> None:
    from deltad.dumps import batch_tokens

    changed, metadata = injected(name, FAULTS[name].strengths[0], arm=arm)
    keep = CRITERIA[arm].keeps(
        batch_tokens(batch(changed), metadata), threshold=0.15, divergence="kl"
    )
    np.testing.assert_array_equal(changed["in_loss"], keep)


@pytest.mark.parametrize("name", ["temperature-behavior", "other-model", "recomputed", "nan-row"])
def test_a_thinned_dump_keeps_its_rule_or_says_that_all_is_stored(name: str) -> None:
    columns, before = clean("smollm2")
    each = FAULTS[name]
    changed, metadata = each.apply(columns, before, each.strengths[-1], np.random.default_rng(0))
    if name == "recomputed":
        assert metadata.stored == {"rule": "all"}
        assert metadata.rows_seen == len(changed["step"]) == len(columns["step"])
        return
    assert (metadata.stored, metadata.rows_seen) == (before.stored, before.rows_seen)
    assert len(changed["step"]) > 100
    if name == "nan-row":
        assert len(changed["step"]) == len(columns["step"]), "placeholders are the evidence"
    else:
        assert (kl(batch_support(batch(changed), metadata)) > 0.05).all()


def test_nothing_is_broken_where_there_is_nothing_to_break() -> None:
    columns, metadata = clean("tiny-whole")
    listed = (columns["topk_ids"] == columns["token_id"][:, None]).any(axis=1)
    rows = {name: values[listed] for name, values in columns.items()}
    with pytest.raises(NothingToBreakError, match="a sampled token outside the top-K"):
        FAULTS["replaced-last"].apply(rows, metadata, 1, np.random.default_rng(0))
    with pytest.raises(NothingToBreakError, match="lists must hold 50 ids"):
        FAULTS["top-k"].apply(columns, metadata, 50, np.random.default_rng(0))


def test_a_dump_is_not_broken_by_a_row_or_two(tmp_path: Path) -> None:
    one_row = dataclasses.replace(FAULTS["zero-advantage"], change=_first_row_zero)
    with pytest.raises(NothingToBreakError, match=r"must change 3 rows of .* or more .* changed 1"):
        write_injected(DUMPS / "smollm2-whole", tmp_path / "run", one_row, seeds=[0])
    out = write_injected(
        DUMPS / "smollm2-whole", tmp_path / "run", dataclasses.replace(one_row, least=1), seeds=[0]
    )
    assert Dump.open(out).seeds("none") == (0,)


def _first_row_zero(rows: Rows, strength: float) -> None:
    rows["advantage"] = np.where(np.arange(len(rows)) == 0, 0, rows["advantage"])


@pytest.fixture(scope="module")
def factory_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dump(
        tmp_path_factory.mktemp("clean") / "run", arms=("none", "ratio"), seeds=(0, -3),
        null_vectors=0.2, empty_seeds=(-3,), rows=60, row_group_size=100,
    )  # fmt: skip


@pytest.mark.parametrize("each", FAULTS.values(), ids=lambda each: each.name)
def test_any_dump_can_be_broken(each: Fault, factory_dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "broken"
    if each.name == "top-k":
        with pytest.raises(NothingToBreakError, match="lists must hold 5 ids or more"):
            write_injected(factory_dump, out, each)
    write_injected(factory_dump, out, each, each.strengths[0], seed=1)
    dump = Dump.open(out)
    assert dump.arms == ("none", "ratio")
    assert dump.seeds("none") == (-3, 0)
    assert dump.rows("none", -3) == 0
    if each.cause is None:
        assert check_dump(out, strict=False) == []


def test_all_arms_of_a_broken_dump_hold_the_same_tokens(tmp_path: Path) -> None:
    for name in ("top-p", "shift", "engine-noise"):
        out = write_injected(DUMPS / "tiny-whole", tmp_path / name, name, seed=4, seeds=[1])
        dump = Dump.open(out)
        first, _ = read_rows(dump, "none", 1)
        for arm in ("ratio", "zero-step"):
            other, _ = read_rows(dump, arm, 1)
            for column in ("token_id", "topk_ids", "topk_behavior_logprobs", "topk_pre_logprobs"):
                np.testing.assert_array_equal(first[column], other[column])
        still, _ = read_rows(dump, "zero-step", 1)
        np.testing.assert_array_equal(still["topk_pre_logprobs"], still["topk_post_logprobs"])
        np.testing.assert_array_equal(still["pre_collision"], still["post_collision"])


def test_a_broken_dump_is_a_whole_one(tmp_path: Path) -> None:
    out = write_injected(
        DUMPS / "smollm2-whole", tmp_path / "run", "temperature-behavior", 0.7, seeds=[0]
    )
    assert check_dump(out, strict=False) == []
    assert (out / "_prompts" / "seed=0" / "part-0-0.parquet").is_file()
    again = write_injected(out, tmp_path / "two", "zero-row", 0.5)
    assert check_dump(again, strict=False)
    with pytest.raises(FileExistsError, match="must be empty"):
        write_injected(DUMPS / "tiny-whole", out, "zero-row")
    with pytest.raises(KeyError, match="flu"):
        write_injected(DUMPS / "tiny-whole", tmp_path / "three", "flu")


def test_columns_over_the_whole_vocabulary_are_left_out_where_nobody_knows_them(
    tmp_path: Path,
) -> None:
    source = make_dump(tmp_path / "clean", seeds=(0,))
    for name, there in (("temperature-policy", False), ("zero-advantage", False)):
        out = write_injected(source, tmp_path / name, name)
        assert ("full_kl_pre" in Dump.open(out).optional_columns("none")) is there
    out = write_injected(source, tmp_path / "masked", "everything-masked")
    assert "full_kl_pre" in Dump.open(out).optional_columns("none")


def test_there_is_a_fault_for_every_cause_that_rows_of_one_arm_may_show() -> None:
    alone = {"impossible-values", "lost-rows"}
    assert {FAULTS[name].cause for name in BROKEN} == set(CAUSES) - alone
