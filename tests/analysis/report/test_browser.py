"""The page in a real browser: it counts as the analysis does, and it can be read and driven."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltad.analysis import Question, RateTable, rate_table
from deltad.analysis.report import Report, report
from deltad.analysis.report import page as pages
from deltad.dumps import Dump
from deltad.masks import Rule, Tokens, rule
from tests.analysis.report.texts import HOSTILE_ARM, ODD
from tests.dumps.factory import OPTIONAL, make_dump, part_files, read_metadata, write_table

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with every optional column, rows without vectors, an empty seed and odd texts.

    Bounds on the error of ΔD are as large as ΔD often is, and weights differ.
    """

    def change(arm: str, seed: int, columns: dict[str, Any]) -> None:
        texts = [ODD[each % len(ODD)] for each in columns["token_id"]]
        columns["token"] = np.array(texts, dtype=object)
        columns["delta_d_noise"] *= 1e8

    path = tmp_path_factory.mktemp("browser") / "run"
    return make_dump(
        path, rows=300, seeds=(0, 1, 2, 7), empty_seeds=(7,), null_vectors=0.1, drift=1.2,
        change=change, ranks=1, parts=1, row_group_size=100,
    )  # fmt: skip


class Page:
    """A page that is open, with what went wrong in it."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.trouble: list[str] = []
        self.context = browser.new_context(offline=True, **options)
        self.tab = self.context.new_page()
        self.tab.on("console", self._heard)
        self.tab.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.tab.on("request", self._asked)
        self.tab.goto(file.as_uri())
        self.tab.wait_for_selector("#viewer[data-decided]", state="attached", timeout=60_000)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.trouble.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", "about:")):
            self.trouble.append(f"asked for {request.url}")

    def close(self) -> None:
        self.context.close()
        assert self.trouble == []

    def choose(self, **values: str) -> None:
        """Set selects by their values."""
        for name, value in values.items():
            self.tab.select_option(f'[data-set="{name}"]', value)
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is done."""
        self.tab.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        )

    def threshold(self, text: str) -> None:
        """Type a threshold."""
        field = self.tab.locator('[data-set="threshold"]')
        field.fill(text)
        field.press("Enter")
        self.settle()

    def value(self, name: str) -> float:
        """A count of the page, with every digit; NaN as the page has it."""
        return float(
            self.tab.locator(f'.counts [data-count="{name}"]').first.get_attribute("data-value")
        )

    def current(self) -> int:
        """The token in focus."""
        return int(self.tab.evaluate("document.activeElement.dataset.token ?? -1"))


def viewer_alone(run: Path, file: Path, **options: Any) -> Path:
    """A page without the sections before the viewer, which have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "SECTIONS", ())
        file.write_text(report(Dump.open(run), **options).html, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def file(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of that dump."""
    return viewer_alone(run, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Page]:
    """The page, open; it must not have complained in the end."""
    opened = Page(browser, file)
    yield opened
    opened.close()


def assert_counts(page: Page, table: RateTable) -> None:
    """The page's counts are the analysis's, in all and by seed."""
    found: dict[str, Any] = {"tokens": table.tokens}
    found |= {"outside": table.outside.tokens, "disagreement": table.disagreement.tokens}
    for name in ("outside", "disagreement"):
        found[f"{name}-base"] = getattr(table, name).increase_rate
        found[f"{name}-guess"] = getattr(table, name).constant_guess
    for side in ("criterion", "baseline"):
        summary = getattr(table, side)
        for name in ("kept", "unsafe", "contracting", "seeds"):
            found[f"{side}-{name}"] = getattr(summary, name)
        found[f"{side}-rate"] = summary.unsafe_keep_rate
        found[f"{side}-fraction"] = summary.contracting_fraction
    found["difference"] = table.paired.difference
    for name, expected in found.items():
        wanted = np.nan if expected is None else expected
        assert page.value(name) == pytest.approx(wanted, rel=1e-12, nan_ok=True), name
    if bounds := page.tab.locator("[data-bounds]").count() > 0:
        for name in ("outside", "disagreement", "criterion", "baseline"):
            expected = getattr(table, name).undetermined
            assert page.value(f"{name}-undetermined") == expected, name
    assert page.tab.locator("[data-weighted]").is_visible() == table.weighted
    paired = page.tab.locator('[data-count="paired"]').get_attribute("data-value")
    assert paired == f"{table.paired.lower} {table.paired.tied} {table.paired.higher}"
    rows = page.tab.locator("[data-seeds] tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent.replaceAll(',', '')))"
    )
    expected_rows = []
    for seed in table.by_seed:
        cells: list[Any] = [seed.seeds[0], seed.tokens]
        cells += ["–" if n is None else n for n in (seed.outside.tokens, seed.disagreement.tokens)]
        for kept in (seed.criterion, seed.baseline):
            rate = "–" if not kept.determined else None
            undetermined = [kept.undetermined] if bounds else []
            cells += [kept.kept, *undetermined, kept.unsafe, kept.contracting]
            cells.append(rate or kept.unsafe_keep_rate)
        expected_rows.append(cells)
    assert len(rows) == len(expected_rows)
    for row, cells in zip(rows, expected_rows, strict=True):
        for cell, expected in zip(row, cells, strict=True):
            if isinstance(expected, float):
                assert abs(float(cell) - expected) <= 0.000501
            else:
                assert cell == str(expected)


def test_counts_are_those_of_the_analysis_at_any_threshold(page: Page, run: Path) -> None:
    dump = Dump.open(run)
    for threshold in ("0.15", "0", "0.0137", "0.5", "1.25", "50"):
        page.threshold(threshold)
        table = rate_table(dump, Question(float(threshold), protocol="shared:none"))
        assert_counts(page, table)


def test_undetermined_tokens_are_counted_apart_and_marked(page: Page, run: Path) -> None:
    table = rate_table(Dump.open(run), Question(0.15, protocol="shared:none"))
    assert 0 < page.value("outside-undetermined") == table.outside.undetermined
    assert 0 < page.value("criterion-undetermined") == table.criterion.undetermined
    page.threshold("0")
    said = {False: 0, True: 0}
    page.tab.keyboard.press("Escape")  # out of the field
    for _ in range(40):
        page.tab.keyboard.press("n")
        card = page.tab.locator("[data-inspector] .badges").inner_text()
        label = page.tab.locator("[data-token]:focus").get_attribute("aria-label")
        below = "ΔD undetermined" in card
        assert below == ("ΔD undetermined" in label)
        assert not (below and "unsafe keep" in card)
        said[below] += 1
    assert min(said.values()) > 0


def test_page_of_a_dump_without_bounds_says_nothing_of_them(browser: Any, tmp_path: Path) -> None:
    optional = [name for name in OPTIONAL if name not in ("delta_d_noise", "weight")]
    path = make_dump(tmp_path / "run", optional=optional, ranks=1, parts=1)
    page = Page(browser, viewer_alone(path, tmp_path / "report.html"))
    assert_counts(page, rate_table(Dump.open(path), Question(0.15, protocol="shared:none")))
    said = page.tab.locator("#viewer").inner_text()
    assert "undet" not in said
    assert "stands for" not in said
    widths = page.tab.locator(".by-seed tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0))"
    )
    assert widths == [12, 8, 12, 12]
    page.close()


def test_counts_follow_pair_and_arm(page: Page, run: Path) -> None:
    dump = Dump.open(run)
    arms = page.tab.locator('[data-set="arm"] option').all_inner_texts()
    assert arms == ["none", "predictive-kl-aggregated", "ratio"]
    pairs = [
        ("predictive-kl-exact", "ratio", "ratio"),
        ("predictive-kl-full", "binary-tv", "none"),
        ("clip-higher", "predictive-kl-uniform", "predictive-kl-aggregated"),
        ("drpo", "icepop", "none"),
        ("ratio", "ratio", "none"),
    ]
    page.threshold("0.21")
    for criterion, baseline, arm in pairs:
        page.choose(criterion=criterion, baseline=baseline, arm=str(arms.index(arm)))
        question = Question(0.21, "kl", criterion, baseline, f"shared:{arm}")
        assert_counts(page, rate_table(dump, question))


def lower(tokens: Tokens) -> Any:
    """How far the policy's entropy lies below 2 nats."""
    return 2 - tokens["pre_entropy"]


OWN = (
    Rule("swing", region=lambda tokens: abs(tokens.log_ratio), push=lower, needs=("pre_entropy",)),
    Rule("binary-kl-full", region="binary-kl", push=lambda tokens: -tokens.log_ratio),
    Rule("fixed", region=lambda tokens: abs(tokens.log_ratio), push="kl-uniform", threshold=0.6),
)
DECIDED_BEFORE = (
    Rule("likely", keep=lambda tokens, threshold, _: tokens.policy_logprob > -6 * threshold),
    Rule("whole", region=lambda tokens: abs(tokens.sequence_log_ratio), scope="sequence"),
    Rule("band", weight=lambda tokens: 1.0 * (abs(tokens.log_ratio) < 0.5)),
)


def test_own_rules_decide_as_in_the_analysis(browser: Any, run: Path, tmp_path: Path) -> None:
    dump, every = Dump.open(run), (*OWN, *DECIDED_BEFORE)
    asked = Question(0.3, baseline=every[0], protocol="shared:none")
    page = Page(
        browser, viewer_alone(run, tmp_path / "report.html", question=asked, criteria=every)
    )
    names = {name: rule(name) for name in ("icepop", "sequence_mask")} | {r.name: r for r in every}
    for name, each in names.items():
        moves = each in OWN
        page.choose(criterion=name, baseline="ratio")
        note = page.tab.locator("[data-fixed]").inner_text()
        assert note == "" if moves else note.startswith(name)
        for threshold in (0.3, 0.05, 0.7) if moves else (0.3,):
            page.threshold(str(threshold))
            table = rate_table(dump, Question(threshold, "kl", each, protocol="shared:none"))
            assert table.disagreement.tokens
            assert_counts(page, table)
    page.close()


def test_where_no_d_is_known_counts_are_dashes(browser: Any, tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", null_vectors=1.0, ranks=1, parts=1)
    page = Page(browser, viewer_alone(path, tmp_path / "report.html"))
    assert_counts(page, rate_table(Dump.open(path), Question(protocol="shared:none")))
    assert np.isnan(page.value("outside"))
    page.close()


def test_slider_moves_the_counts_to_what_the_analysis_says(page: Page, run: Path) -> None:
    dump = Dump.open(run)
    seen = set()
    for place in (0, 300, 640, 900, 1000):
        page.tab.locator("#slider").evaluate(
            "(it, place) => { it.value = place; it.dispatchEvent(new Event('input')); }",
            place,
        )
        page.settle()
        threshold = float(page.tab.input_value('[data-set="threshold"]'))
        seen.add(threshold)
        assert_counts(page, rate_table(dump, Question(threshold, protocol="shared:none")))
    assert len(seen) == 5
    page.tab.locator("#slider").press("ArrowLeft")
    page.settle()
    assert float(page.tab.input_value('[data-set="threshold"]')) not in seen


def test_threshold_stops_where_tokens_are_missing_and_says_why(
    browser: Any, tmp_path: Path
) -> None:
    path = make_dump(tmp_path / "run", stored=("kl", 0.05), ranks=1, parts=1)
    page = Page(browser, viewer_alone(path, tmp_path / "report.html"))
    page.threshold("0.01")
    assert page.tab.input_value('[data-set="threshold"]') == "0.05"
    note = page.tab.locator("[data-note]").inner_text()
    assert note.startswith("δ stops at 0.05 nats: the dump stores only tokens with kl above 0.05")
    question = Question(0.05, protocol="shared:none")
    assert_counts(page, rate_table(Dump.open(path), question))
    assert page.tab.locator(".gap").count() > 0
    page.close()


def test_keys_go_from_token_to_token(page: Page) -> None:
    tab = page.tab
    tab.locator("[data-responses]").scroll_into_view_if_needed()
    tab.keyboard.press("j")
    assert page.current() == 0
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert page.current() == 2
    tab.keyboard.press("ArrowLeft")
    assert page.current() == 1
    tab.keyboard.press("End")
    end = page.current()
    tab.keyboard.press("j")
    assert page.current() == end + 1
    tab.keyboard.press("k")
    assert page.current() == 0
    tab.keyboard.press("ArrowDown")
    assert page.current() > end
    tab.keyboard.press("ArrowUp")
    assert page.current() <= end
    tab.keyboard.press("n")
    first = page.current()
    element = tab.locator(f'[data-token="{first}"]')
    assert "disagreement" in element.get_attribute("class")
    assert "in disagreement" in element.get_attribute("aria-label")
    assert element.get_attribute("aria-selected") == "true"
    tab.keyboard.press("n")
    assert page.current() > first
    tab.keyboard.press("p")
    assert page.current() == first
    assert tab.locator("[data-token][tabindex='0']").count() == 1
    assert "disagreement" in tab.locator("[data-inspector]").inner_text()
    outline = element.evaluate("span => getComputedStyle(span).outlineStyle")
    assert outline == "solid"


def test_help_opens_and_closes_and_keys_are_not_taken_from_fields(page: Page) -> None:
    tab = page.tab
    tab.keyboard.press("?")
    assert tab.locator("#help").is_visible()
    tab.keyboard.press("Escape")
    assert not tab.locator("#help").is_visible()
    tab.keyboard.press("/")
    tab.keyboard.type("n?")
    assert tab.input_value('[data-set="text"]') == "n?"
    assert not tab.locator("#help").is_visible()


def test_pointing_at_a_token_shows_the_top_k_and_every_decision(page: Page, run: Path) -> None:
    tab = page.tab
    tab.keyboard.press("n")
    i = page.current()
    tab.mouse.move(0, 0)
    tab.locator(f'[data-token="{i + 1}"]').hover()
    card = tab.locator("[data-inspector]")
    where = card.locator(".where").inner_text()
    dump = Dump.open(run)
    found = None
    for batch in dump.batches("none", 0):
        for row in range(len(batch)):
            said = (
                f"seed 0 · step {batch['step'][row]} · group {batch['group'][row]} · "
                f"response {batch['sequence'][row]} · position {batch['position'][row]}"
            )
            if said == where:
                found = {name: values[row] for name, values in batch.columns.items()}
    assert found is not None
    numbers = dict(
        card.locator(".numbers > div").evaluate_all(
            "rows => rows.map(row => [...row.children].map(each => each.textContent))"
        )
    )
    ratio = np.exp(float(found["pre_logprob"]) - float(found["behavior_logprob"]))
    assert float(numbers["r = π/μ"]) == pytest.approx(ratio, rel=1e-2)
    assert float(numbers["Â"].replace("−", "-")) == pytest.approx(found["advantage"], abs=1e-3)
    rows = card.locator(".topk tbody tr").evaluate_all(
        "rows => rows.map(row => [row.firstChild.title, ...[...row.cells].slice(1, 4).map(cell => "
        "cell.textContent)])"
    )
    assert rows[-1][0] == ""
    by_id = {title: shares for title, *shares in rows[:-1]}
    for place, token in enumerate(found["topk_ids"]):
        if token < 0:
            continue
        for share, name in zip(by_id[f"id {token}"], ("behavior", "pre", "post"), strict=True):
            exact = 100 * np.exp(float(found[f"topk_{name}_logprobs"][place]))
            assert float(share.replace("<", "")) == pytest.approx(exact, abs=0.011 + 3e-4 * exact)
    assert f"id {found['token_id']}" in by_id
    decisions = card.locator(".decisions li").all_inner_texts()
    assert len(decisions) == tab.locator('[data-set="criterion"] option').count()
    assert all(each.endswith(("keeps", "masks", "unknown")) for each in decisions)


def test_filters_show_the_responses_that_hold_such_tokens(page: Page) -> None:
    tab = page.tab
    shown = "[data-responses] article"

    def marked(name: str) -> list[bool]:
        found: list[bool] = tab.locator(shown).evaluate_all(
            f"all => all.map(each => each.querySelector('.t.{name}:not(.faint)') !== null)"
        )
        return found

    everything = tab.locator("[data-found]").inner_text()
    assert everything.startswith("180 of 180 responses, 900 tokens")
    for decision, name in (("disagreement", "disagreement"), ("unsafe-criterion", "unsafe")):
        page.choose(decision=decision)
        count = page.value("disagreement" if name == "disagreement" else "criterion-unsafe")
        assert f", {count:.0f} tokens" in tab.locator("[data-found]").inner_text()
        assert marked(name)
        assert all(marked(name))
    page.choose(decision="masked:clip-higher", seed="1")
    names = tab.locator(f"{shown} > header > .quiet").all_inner_texts()
    assert names
    assert all(name.startswith("seed 1 ") for name in names)
    tab.locator("[data-clear]").click()
    assert tab.locator("[data-found]").inner_text() == everything
    tab.fill('[data-set="text"]', "سلام")
    page.settle()
    said = tab.locator(".t:not(.faint):not(.marks .t)").all_inner_texts()
    assert set(said) == {"سلام"}
    tab.locator("[data-clear]").click()
    page.choose(sort="disagreement")
    counts = tab.locator(shown).evaluate_all(
        "all => all.map(each => each.querySelectorAll('.t.disagreement').length)"
    )
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    tab.fill('[data-set="step"]', "9999")
    page.settle()
    assert "nothing fits" in tab.locator("[data-found]").inner_text()


def test_what_cannot_be_seen_is_written(page: Page) -> None:
    said = set(page.tab.locator("[data-responses] .t").all_inner_texts())
    assert {"·the", "⏎", "⇥", "⟨202E⟩", "<b>", "<0x0A>", "∅", "سلام"} <= said


def test_marks_are_shapes_and_not_colours_alone(page: Page) -> None:
    styles = page.tab.evaluate(
        """() => {
          const style = (selector, pseudo) =>
            getComputedStyle(document.querySelector(`.marks ${selector}`), pseudo);
          return {
            outside: style(".outside").textDecorationLine,
            disagreement: style(".disagreement").borderTopColor,
            unsafe: style(".unsafe", "::after").content,
            baseline: style(".unsafe-baseline", "::after").content,
          };
        }"""
    )
    assert styles["outside"] == "underline"
    assert "0)" not in styles["disagreement"].replace("rgb(0, 0, 0)", "")
    assert (styles["unsafe"], styles["baseline"]) == ('"▲"', '"△"')


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`."""
    parts = [float(each) / 255 for each in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    line = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * line[0] + 0.7152 * line[1] + 0.0722 * line[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(browser: Any, file: Path, scheme: str) -> None:
    page = Page(browser, file, color_scheme=scheme)
    tab = page.tab
    ground = luminance(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (ground < 0.1) == (scheme == "dark")
    for colour in ("d_pre", "delta_d", "ratio", "entropy", "advantage", "d_dot"):
        page.choose(colour=colour)
        pairs = tab.locator("[data-responses] .t").evaluate_all(
            "all => all.map(each => getComputedStyle(each)).map(s => [s.color, s.backgroundColor])"
        )
        grounds = {pair[1] for pair in pairs}
        assert len(grounds) > 4, colour
        for ink, under in {tuple(pair) for pair in pairs}:
            if under == "rgba(0, 0, 0, 0)":
                continue
            a, b = luminance(ink), luminance(under)
            assert (max(a, b) + 0.05) / (min(a, b) + 0.05) >= 4.5, (colour, ink, under)
    tab.locator("[data-theme-toggle]").click()
    other = luminance(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (other < 0.1) == (scheme == "light")
    page.close()


def test_page_fits_a_narrow_screen(browser: Any, file: Path) -> None:
    page = Page(browser, file, viewport={"width": 360, "height": 740})
    tab = page.tab
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.keyboard.press("n")
    card = tab.locator("[data-inspector]")
    assert card.is_visible()
    token = tab.locator("[data-token]:focus").bounding_box()
    assert token["y"] + token["height"] <= card.bounding_box()["y"]
    card.locator("[data-close]").click()
    assert not card.is_visible()
    page.close()


def test_page_works_in_the_frame_of_a_notebook(browser: Any, run: Path, tmp_path: Path) -> None:
    inner = viewer_alone(run, tmp_path / "report.html", seeds=[1]).read_text(encoding="utf-8")
    outer = tmp_path / "notebook.html"
    outer.write_text(f"<!doctype html><body>{Report(inner)._repr_html_()}</body>", encoding="utf-8")
    tab = browser.new_page()
    trouble: list[str] = []
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.goto(outer.as_uri())
    frame = tab.frame_locator("iframe")
    frame.locator("#viewer[data-decided]").wait_for(state="attached", timeout=60_000)
    frame.locator('nav a[href="#tokens"]').click()
    assert frame.locator("[data-responses] .t").count() > 0
    assert frame.locator("[data-found]").inner_text().startswith("60 of 60 responses, 300 tokens")
    assert trouble == []
    tab.close()


@pytest.mark.parametrize("name", ["tiny-whole", "tiny-near", "smollm2"])
def test_recorded_dumps_count_as_the_analysis_says(browser: Any, name: str, tmp_path: Path) -> None:
    path = ROOT / "data_dumps" / name
    page = Page(browser, viewer_alone(path, tmp_path / "report.html"))
    for threshold, arm in ((0.15, 0), (0.06, 0), (0.4, 1)):
        page.choose(arm=str(arm))
        page.threshold(str(threshold))
        protocol = f"shared:{('none', 'predictive-kl-aggregated')[arm]}"
        assert_counts(page, rate_table(Dump.open(path), Question(threshold, protocol=protocol)))
    page.close()


def copied(run: Path, target: Path, times: int) -> Path:
    """A dump whose responses are there many times over, with log-probs a little apart."""
    rng = np.random.default_rng(0)
    for part in part_files(run):
        table, metadata = pq.ParquetFile(part).read(), read_metadata(part)
        copies = []
        for copy in range(times):
            columns = {name: table.column(name).combine_chunks() for name in table.schema.names}
            sequence = columns["sequence"].to_numpy() + copy * 10_000
            columns["sequence"] = pa.array(sequence, pa.int32())
            for name in ("topk_behavior_logprobs", "topk_pre_logprobs", "topk_post_logprobs"):
                lists = columns[name]
                flat = lists.flatten().to_numpy()
                moved = (flat - rng.uniform(0, 4e-5, len(flat))).astype(np.float32)
                columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(moved), type=lists.type)
            copies.append(pa.table(columns, schema=table.schema))
        file = target / part.relative_to(run)
        file.parent.mkdir(parents=True)
        metadata["rows_seen"] *= times
        write_table(file, pa.concat_tables(copies), metadata, row_group_size=32_768)
    return target


@pytest.mark.slow
def test_a_hundred_thousand_tokens_load_and_react(browser: Any, tmp_path: Path) -> None:
    path = copied(ROOT / "data_dumps" / "tiny-whole", tmp_path / "run", 24)
    dump = Dump.open(path)
    file = viewer_alone(path, tmp_path / "report.html", tokens=200_000)
    megabytes = file.stat().st_size / 1e6
    assert megabytes < 16
    begun = time.perf_counter()
    page = Page(browser, file)
    loaded = time.perf_counter() - begun
    tokens = sum(dump.rows("none", seed) for seed in dump.seeds("none"))
    assert tokens > 100_000
    assert page.value("tokens") == tokens
    counted, drawn = [], []
    for threshold in (0.4, 0.05, 0.15):
        page.threshold(str(threshold))
        # The copied D is not that of the moved log-probs.
        question = Question(threshold, protocol="shared:none")
        assert_counts(page, rate_table(dump, question, recompute=True))
        times = page.tab.eval_on_selector("#viewer", "e => [e.dataset.countMs, e.dataset.totalMs]")
        counted.append(float(times[0]))
        drawn.append(float(times[1]))
    assert page.tab.locator("[data-responses] .t").count() < 5_000
    page.tab.keyboard.press("Escape")  # out of the field
    for _ in range(3):
        page.tab.keyboard.press("n")
    assert page.current() > 0
    page.tab.locator("[data-responses]").evaluate("list => list.scrollTo(0, list.scrollHeight)")
    last = page.tab.locator(f'[data-token="{tokens - 1}"]')
    last.wait_for(timeout=20_000)
    page.close()
    print(
        f"\n{tokens} tokens, {megabytes:.1f} MB, open in {loaded:.1f} s; a threshold counts in "
        f"{max(counted):.0f} ms and is drawn in {max(drawn):.0f} ms"
    )


def test_hostile_text_is_shown_and_never_run(browser: Any, html_file: Path) -> None:
    page = Page(browser, html_file)
    page.tab.on("dialog", lambda dialog: page.trouble.append(dialog.message))
    page.choose(arm="1", decision="outside")
    page.tab.locator("[data-clear]").click()
    page.tab.keyboard.press("j")
    for place in (".facts", ".prompt", "[data-inspector]", "[data-responses]", '[data-set="arm"]'):
        said = page.tab.locator(place).first.inner_text()
        wanted = HOSTILE_ARM if place.endswith('"arm"]') else "alert(1)"
        assert wanted in said.replace("·", " "), place
    assert page.tab.evaluate("document.images.length") == 0
    assert page.tab.evaluate("document.scripts.length") == 2
    page.close()


def test_whole_page_has_its_figures_and_no_complaint(browser: Any, html_file: Path) -> None:
    page = Page(browser, html_file, color_scheme="dark")
    assert page.tab.locator(".failed").count() == 0
    sizes = page.tab.locator("figure svg").evaluate_all(
        "all => all.map(each => each.getBBox()).map(box => box.width * box.height)"
    )
    assert len(sizes) >= 7
    assert min(sizes) > 10_000
    links = page.tab.locator("nav a").evaluate_all("all => all.map(each => each.hash)")
    assert all(page.tab.locator(f"section{link} h2").count() == 1 for link in links)
    ids = page.tab.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))
    page.close()


def test_without_the_policy_after_the_update_counts_of_delta_are_dashes(
    browser: Any, run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for part in part_files(copy):
        table = pq.ParquetFile(part).read().drop_columns(["post_logprob", "topk_post_logprobs"])
        write_table(part, table, read_metadata(part))
    page = Page(browser, viewer_alone(copy, tmp_path / "report.html"))
    try:
        theirs = rate_table(Dump.open(run))
        assert 0 < page.value("outside") == theirs.outside.tokens
        assert 0 < page.value("disagreement") == theirs.disagreement.tokens
        assert page.value("criterion-kept") == theirs.criterion.kept
        for name in ("outside-base", "outside-guess", "criterion-unsafe", "baseline-contracting",
                     "criterion-rate", "baseline-fraction", "difference"):  # fmt: skip
            assert np.isnan(page.value(name)), name
        assert page.value("criterion-seeds") == 0
        shown = page.tab.locator('.counts [data-count="criterion-unsafe"]').first.inner_text()
        assert shown == "–"
        assert "ΔD and π after the update are unknown" in page.tab.locator("#tokens").inner_text()
        page.tab.locator("[data-token].outside").first.click()
        page.settle()
        after = page.tab.locator(".topk tbody td:nth-child(4)").all_inner_texts()
        assert {*after} == {"–"}
    finally:
        page.close()
