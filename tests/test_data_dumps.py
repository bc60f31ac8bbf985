"""The recorded dumps: in order, and saying what their page says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltad.analysis import (
    LadderTable,
    ProtocolTable,
    Question,
    RateTable,
    TokenTable,
    ladder_table,
    protocol_table,
    rate_table,
)
from deltad.dumps import Dump, check_dump, read_prompts

pytestmark = pytest.mark.pages

FOLDER = Path(__file__).parents[1] / "data_dumps"
PAGE = (FOLDER / "README.md").read_text()
RECORDED = sorted(each.name for each in FOLDER.iterdir() if each.is_dir())


def _has_ladder(name: str) -> bool:
    dump = Dump.open(FOLDER / name)
    return "linear_delta_own" in dump.optional_columns("none")


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def protocols(request: pytest.FixtureRequest) -> ProtocolTable:
    return protocol_table(Dump.open(FOLDER / request.param))


def test_every_dump_has_its_line() -> None:
    assert RECORDED
    for name in RECORDED:
        assert f"| `{name}` | `deltad record " in PAGE


@pytest.mark.parametrize("name", RECORDED)
def test_every_dump_is_in_order(name: str) -> None:
    assert check_dump(FOLDER / name, strict=False) == []


@pytest.mark.parametrize("name", [name for name in RECORDED if name.endswith("-whole")])
def test_whole_dumps_hold_the_same_updates_as_the_others(name: str) -> None:
    """A token stored in both has the same numbers: recording repeats bit for bit."""
    whole, thinned = Dump.open(FOLDER / name), Dump.open(FOLDER / name.removesuffix("-whole"))
    for arm in whole.arms:
        for seed in whole.seeds(arm):
            assert read_prompts(whole.path, seed=seed)
            every = {
                (batch["step"][row], batch["sequence"][row], batch["position"][row]): post
                for batch in whole.batches(arm, seed)
                for row, post in enumerate(batch["post_logprob"])
            }
            assert len(every) == whole.rows_seen(arm, seed) == thinned.rows_seen(arm, seed)
            for batch in thinned.batches(arm, seed):
                keys = zip(batch["step"], batch["sequence"], batch["position"], strict=True)
                np.testing.assert_array_equal([every[key] for key in keys], batch["post_logprob"])


def test_recorded_scalars_count_as_the_vectors_of_the_whole_dump_do() -> None:
    near, whole = Dump.open(FOLDER / "tiny-near"), Dump.open(FOLDER / "tiny-whole")
    assert near.metadata("none").near is not None
    for arm in near.arms:
        question = Question(protocol=f"shared:{arm}")
        ours, vectors, theirs = (
            rate_table(near, question).by_seed[0],
            rate_table(near, question, recompute=True).by_seed[0],
            rate_table(whole, question).by_seed[0],
        )
        for other in (vectors, theirs):
            assert ours.tokens == other.tokens
            assert ours.outside.tokens == other.outside.tokens
            assert ours.disagreement.tokens == other.disagreement.tokens
            assert ours.baseline.kept == other.baseline.kept
            assert ours.baseline.unsafe == other.baseline.unsafe
            assert ours.criterion.unsafe == other.criterion.unsafe
        assert ours.outside.tokens


def test_zero_step_of_the_recorded_seeds_moves_nothing() -> None:
    dump = Dump.open(FOLDER / "tiny")
    for seed in dump.seeds("zero-step"):
        for batch in dump.batches("zero-step", seed):
            np.testing.assert_array_equal(batch["pre_logprob"], batch["post_logprob"])
            np.testing.assert_array_equal(batch["topk_pre_logprobs"], batch["topk_post_logprobs"])


def test_page_prints_what_is_computed(protocols: ProtocolTable) -> None:
    for table in protocols.tables:
        assert _row(table) in PAGE


@pytest.mark.parametrize("name", [name for name in RECORDED if _has_ladder(name)])
def test_page_prints_the_ladders_that_are_computed(name: str) -> None:
    table = ladder_table(Dump.open(FOLDER / name))
    assert not table.missing
    for row in _ladder_rows(table):
        assert row in PAGE


@pytest.mark.parametrize("name", [name for name in RECORDED if name.endswith("-ladder")])
def test_dumps_with_the_ladder_hold_the_same_updates_as_the_others(name: str) -> None:
    """Measuring it changed nothing of a real model's updates either."""
    with_ladder, without = (
        Dump.open(FOLDER / each) for each in (name, name.removesuffix("-ladder"))
    )
    for arm in with_ladder.arms:
        for seed in with_ladder.seeds(arm):
            (ours,), (theirs,) = with_ladder.batches(arm, seed), without.batches(arm, seed)
            for column, values in theirs.columns.items():
                assert values.tobytes() == ours[column].tobytes(), column


def test_page_says_how_far_from_a_second_engine_the_trainer_is() -> None:
    behavior = Dump.open(FOLDER / "smollm2-vllm").metadata("none").behavior
    assert (behavior["engine"], behavior["precision"]) == ("vllm", "bfloat16")
    assert f"vLLM {behavior['version']}" in PAGE
    for row in _engine_rows("smollm2-whole", "smollm2-vllm"):
        assert row in PAGE


def _engine_rows(*names: str) -> list[str]:
    """Tokens, mean D before the step and tokens outside, of each step of seed 0."""
    frames = [
        TokenTable(Dump.open(FOLDER / name), seeds=[0]).to_frame().groupby("step") for name in names
    ]
    rows = []
    for step in frames[0].groups:
        parts = [frame.get_group(step) for frame in frames]
        cells = [f"{len(g)} | {g['d_pre'].mean():.4f} | {g['outside'].sum()}" for g in parts]
        rows.append(f"| {step} | {' | '.join(cells)} |")
    return rows


def _ladder_rows(table: LadderTable) -> list[str]:
    """The rungs as the page has them."""
    rows = []
    for rung in table.rungs:
        shares = [
            table.right(rung.name, name, within).value
            for within in ("outside", "disagreement")
            for name in table.criteria
        ]
        shares += [table.increase(rung.name).value, table.agreement(rung.name).value]
        rows.append(f"| {rung.label} | {' | '.join(f'{share:.3f}' for share in shares)} |")
    return rows


def _row(table: RateTable) -> str:
    """A protocol as the page has it."""

    def share(value: float) -> str:
        return f"{value:.3f}"

    def signed(value: float) -> str:
        return f"{value:+.3f}".replace("-", "−")

    ours, theirs, paired = table.criterion, table.baseline, table.paired
    cells = [
        f"`{table.question.protocol}`",
        *(
            f"{share(side.unsafe_keep_rate)} [{', '.join(map(share, side.unsafe_keep_rate_ci95))}]"
            for side in (ours, theirs)
        ),
        f"{signed(paired.difference)} [{', '.join(map(signed, paired.difference_ci95))}]",
        f"{paired.lower} / {paired.tied} / {paired.higher}",
        f"{paired.sign_test_p:.2g}",
        f"{share(ours.contracting_fraction)} / {share(theirs.contracting_fraction)}",
        share(table.disagreement.increase_rate),
    ]
    return f"| {' | '.join(cells)} |"
