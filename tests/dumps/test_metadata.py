"""The footer's JSON: what is kept, what is needed, what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltad
from deltad.dumps import DumpError, Metadata, Near, Pair

KNOWN = {
    "format": 1,
    "deltad": "0.0.1",
    "top_k": 20,
    "vocab_size": 72,
    "temperature": 0.8,
    "model": "m",
    "tokenizer": "t",
    "behavior": {"engine": "vllm"},
    "readout": {"logits_rounded": True},
    "update": {"mask": "ratio", "threshold": 0.15, "divergence": "kl"},
    "stored": {"rule": "above", "divergence": "kl", "threshold": 0.05},
    "rows_seen": 12,
    "versions": {"torch": "2.13"},
    "created": "2026-01-02T03:04:05+00:00",
    "ranks": 3,
    "derived": {"version": 1, "divergence": "tv", "arithmetic": "0badcafe"},
    "vectors": {"rule": "near", "divergence": "tv", "threshold": 0.02, "sample": 0.5},
    "sampling": {"sequences": 0.25, "every": 4, "seed": 7},
}


NEAR = {"rule": "near", "divergence": "kl", "threshold": 0.01, "sample": 0.01}
PAIR = {
    "rule": "disagreement", "divergence": "kl", "threshold": 0.15,
    "criterion": "predictive-kl-aggregated", "baseline": "ratio", "outside": 4,
}  # fmt: skip


def test_what_was_left_out_is_told_by_properties() -> None:
    plain = Metadata(top_k=2, vocab_size=9)
    assert (plain.derived_divergence, plain.near, plain.stored_pair) == (None, None, None)
    assert plain.stored_outside is None
    assert not {"derived", "vectors", "sampling"} & json.loads(plain.to_json()).keys()
    assert Metadata(top_k=2, vocab_size=9, vectors={"rule": "all"}).near is None
    metadata = Metadata(
        top_k=2, vocab_size=9, vectors=NEAR, stored=PAIR, derived={"version": 1, "divergence": "tv"}
    )
    assert metadata.near == Near(0.01, 0.01, "kl")
    assert metadata.stored_above == ("kl", 0.15)
    assert metadata.stored_outside == 4
    assert metadata.derived_divergence == "tv"
    pair = metadata.stored_pair
    assert pair == Pair("kl", 0.15, "predictive-kl-aggregated", "ratio")
    assert pair.answers(Pair("kl", 0.15, "ratio", "predictive-kl-aggregated"))
    assert not pair.answers(Pair("kl", 0.16, "predictive-kl-aggregated", "ratio"))
    other = Metadata(top_k=2, vocab_size=9, derived={"version": 2, "divergence": "kl", "more": 1})
    assert other.derived_divergence is None


def test_a_number_of_ranks_that_is_not_said_is_left_out() -> None:
    metadata = Metadata(top_k=2, vocab_size=9)
    assert "ranks" not in json.loads(metadata.to_json())
    assert Metadata.from_json(metadata.to_json(), "f").ranks is None
    with pytest.raises(ValueError, match="`ranks` must be an integer of at least 1, got 0"):
        Metadata(top_k=2, vocab_size=9, ranks=0)


def test_every_key_goes_there_and_back() -> None:
    read = Metadata.from_json(json.dumps({**KNOWN, "colour": {"a": [1, None]}}), "f")
    assert {key: getattr(read, key) for key in KNOWN} == KNOWN
    assert read.extra == {"colour": {"a": [1, None]}}
    assert json.loads(read.to_json()) == {**KNOWN, "colour": {"a": [1, None]}}
    assert Metadata.from_json(read.to_json(), "f") == read


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.text(), json_values))
def test_unknown_keys_are_kept(extra: dict[str, Any]) -> None:
    extra = {key: value for key, value in extra.items() if key not in KNOWN}
    written = Metadata(top_k=2, vocab_size=9, extra=extra).to_json()
    assert Metadata.from_json(written, "f").extra == extra


def test_a_writer_needs_to_say_k_and_n_alone() -> None:
    metadata = Metadata(top_k=2, vocab_size=9)
    assert (metadata.format, metadata.deltad) == (1, deltad.__version__)
    assert metadata.stored == {"rule": "all"}
    assert metadata.stored_above is None


def test_numpy_numbers_in_descriptions_become_json() -> None:
    update = {"lr": np.float32(0.5), "batch": np.int64(8), "shape": np.arange(3)}
    written = Metadata(top_k=2, vocab_size=9, update=update).to_json()
    assert json.loads(written)["update"] == {"lr": 0.5, "batch": 8, "shape": [0, 1, 2]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_what_has_no_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="metadata must be JSON"):
        Metadata(top_k=2, vocab_size=9, update={"lr": value}).to_json()


def test_tolerance_is_wider_where_logits_were_rounded() -> None:
    assert Metadata(top_k=2, vocab_size=9).logprob_tolerance == 1e-4
    rounded = Metadata(top_k=2, vocab_size=9, readout={"logits_rounded": True})
    assert rounded.logprob_tolerance == 0.05


def test_descriptions_may_be_missing_or_null() -> None:
    needed = ("format", "top_k", "vocab_size", "temperature", "stored", "rows_seen")
    small = {key: KNOWN[key] for key in needed}
    read = Metadata.from_json(json.dumps({**small, "model": None}), "f")
    assert (read.model, read.update, read.deltad) == ("", {}, "")


@pytest.mark.parametrize("key", ["top_k", "vocab_size", "temperature", "stored", "rows_seen"])
def test_a_missing_key_that_reading_needs_is_named(key: str) -> None:
    text = json.dumps({name: value for name, value in KNOWN.items() if name != key})
    with pytest.raises(DumpError, match=rf"^a/f: in the metadata, `{key}` is missing$"):
        Metadata.from_json(text, "a/f")


@pytest.mark.parametrize("found", [2, 0, 2.5, "1", None, True, float("nan"), [1]])
def test_another_major_format_is_refused_by_name(found: object) -> None:
    # A future format may lack every key of this one.
    with pytest.raises(DumpError, match=r"f: .*`format` must be 1.*found") as caught:
        Metadata.from_json(json.dumps({"format": found}), "f")
    assert repr(found) in str(caught.value)


def test_a_minor_format_is_read() -> None:
    assert Metadata.from_json(json.dumps({**KNOWN, "format": 1.3}), "f").format == 1


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("top_k", 0, "integer of at least 1"),
        ("top_k", 2.0, "integer of at least 1"),
        ("top_k", True, "integer of at least 1"),
        ("top_k", None, "integer of at least 1"),
        ("vocab_size", -3, "integer of at least 1"),
        ("vocab_size", 2**31, "at most 2147483647"),
        ("rows_seen", -1, "integer of at least 0"),
        ("temperature", 10**400, "positive number"),
        ("temperature", 0, "positive number"),
        ("temperature", "1", "positive number"),
        ("temperature", float("inf"), "positive number"),
        ("temperature", False, "positive number"),
        ("update", [], "must be an object"),
        ("model", 3, "must be a string"),
        ("stored", {}, "rule of `stored`"),
        ("stored", {"rule": "some"}, "rule of `stored`"),
        ("stored", {"rule": "above"}, "divergence of `stored`"),
        ("stored", {"rule": "above", "divergence": "js", "threshold": 1}, "one of kl, tv"),
        ("stored", {"rule": "above", "divergence": ["kl"], "threshold": 1}, "one of kl, tv"),
        ("stored", {"rule": "above", "divergence": "kl"}, "threshold of `stored`"),
        ("stored", {"rule": "above", "divergence": "kl", "threshold": -1}, "at least 0"),
        ("stored", {"rule": "above", "divergence": "kl", "threshold": float("nan")}, "number"),
        ("stored", "all", "must be an object"),
        ("stored", {**PAIR, "threshold": None}, "threshold of `stored`"),
        ("stored", {**PAIR, "criterion": ["ratio"]}, "the criterion of `stored`"),
        ("stored", {**PAIR, "baseline": ["ratio"]}, "the baseline of `stored`"),
        ("stored", {**PAIR, "outside": -1}, "`outside` of `stored`"),
        ("stored", {**PAIR, "outside": True}, "`outside` of `stored`"),
        ("derived", "kl", "must be an object"),
        ("derived", {"divergence": "kl"}, "the version of `derived`"),
        ("derived", {"version": 1.5, "divergence": "kl"}, "the version of `derived`"),
        ("derived", {"version": 1, "divergence": "js"}, "the divergence of `derived`"),
        ("derived", {"version": 1, "divergence": "kl", "arithmetic": 7}, "`arithmetic` of"),
        ("vectors", {"rule": "far"}, "the rule of `vectors`"),
        ("vectors", {**NEAR, "divergence": None}, "the divergence of `vectors`"),
        ("vectors", {**NEAR, "threshold": -0.1}, "the threshold of `vectors`"),
        ("vectors", {**NEAR, "sample": 1.1}, "the sample of `vectors`"),
        ("vectors", {"rule": "near", "divergence": "kl", "threshold": 0.1}, "the sample of"),
        ("sampling", [0.5], "must be an object"),
        ("sampling", {"sequences": 0}, "`sequences` of `sampling`"),
        ("sampling", {"sequences": 1.5}, "`sequences` of `sampling`"),
        ("sampling", {"every": 0}, "`every` of `sampling`"),
        ("sampling", {"seed": 0.5}, "`seed` of `sampling`"),
    ],
)
def test_an_impossible_value_is_refused_with_its_key(key: str, value: Any, expected: str) -> None:
    with pytest.raises(DumpError, match=rf"^a/f: .*`{key}`.*{expected}|^a/f: .*{expected}"):
        Metadata.from_json(json.dumps({**KNOWN, key: value}), "a/f")


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "7", '"x"', b"\xff\xfe\xfa", "[" * 100_000, "nonsense\nmore"]
)
def test_what_is_no_json_object_is_one_sentence(text: str | bytes) -> None:
    with pytest.raises(DumpError, match=r"^f: the metadata under the key `deltad`") as caught:
        Metadata.from_json(text, "f")
    assert "\n" not in str(caught.value)


def test_extra_cannot_hide_a_known_key() -> None:
    with pytest.raises(ValueError, match="unknown keys only, got top_k"):
        Metadata(top_k=2, vocab_size=9, extra={"top_k": 3})
