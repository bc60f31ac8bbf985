"""Engines' own responses in files are the behavior side of an import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.dumps import check_dump
from deltad.probes.offline import EngineFiles, OfflineError, ScoringFiles, import_dump
from deltad.probes.offline.faults import Faults
from tests.probes.offline.exported import rows_of, write_json

ROOT = Path(__file__).parents[3]


def sglang(*tokens: tuple[int, list[tuple[int, float]]], prompt: int = 5) -> dict[str, Any]:
    """A response of SGLang: sampled ids with their lists of ids and probabilities."""
    return {
        "text": "",
        "meta_info": {
            "id": f"r{prompt}",
            "prompt_tokens": 1,
            "output_token_logprobs": [
                [float(np.log(dict(listed).get(token, 0.05))), token, None]
                for token, listed in tokens
            ],
            "output_top_logprobs": [
                [[float(np.log(p)), each, None] for each, p in listed] for _, listed in tokens
            ],
        },
    }


TWO = sglang((7, [(7, 0.5), (3, 0.25)]), (4, [(2, 0.75), (4, 0.125)]))
ONE = sglang((9, [(1, 0.5), (2, 0.25)]), prompt=6)  # 9 is not listed
ADVANTAGES: list[dict[str, Any]] = [
    {"sequence": 0, "advantage": 1.0},
    {"sequence": 1, "advantage": [-1.0]},
]


def test_sglangs_responses_become_rows(tmp_path: Path) -> None:
    source = EngineFiles(
        "sglang", [write_json(tmp_path / "rollout.jsonl", [TWO, ONE])], step=3, temperature=0.7
    )
    assert source.behavior == {
        "engine": "sglang", "support": "union", "logprobs_mode": "tempered_logprobs",
    }  # fmt: skip
    import_dump(
        source,
        tmp_path / "run",
        join=ScoringFiles([write_json(tmp_path / "adv.jsonl", ADVANTAGES)], step=3),
        metadata={"vocab_size": 10, "temperature": 0.7, "behavior": source.behavior},
    )
    rows = rows_of(tmp_path / "run", "actual", 0)
    assert [row["token_id"] for row in rows] == [7, 4, 9]
    assert [row["topk_ids"] for row in rows] == [[7, 3], [2, 4], [1, 2]]
    assert [row["advantage"] for row in rows] == [1.0, 1.0, -1.0]
    assert [row["group"] for row in rows] == [0, 0, 1]
    assert {row["step"] for row in rows} == {3}
    np.testing.assert_allclose(np.exp(rows[2]["behavior_logprob"]), 0.05, rtol=1e-6)
    assert not check_dump(tmp_path / "run")


def test_a_document_is_read_too_and_lists_are_cut(tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text(json.dumps([TWO, ONE], indent=1), encoding="utf-8")
    source = EngineFiles("sglang", [tmp_path / "all.json"], top_k=1)
    import_dump(
        source,
        tmp_path / "run",
        join=ScoringFiles([write_json(tmp_path / "adv.jsonl", ADVANTAGES)]),
        metadata={"vocab_size": 10},
    )
    assert [row["topk_ids"] for row in rows_of(tmp_path / "run", "actual", 0)] == [[7], [2], [1]]


def test_without_advantages_they_are_asked_for(tmp_path: Path) -> None:
    source = EngineFiles("sglang", [write_json(tmp_path / "rollout.jsonl", [TWO])])
    with pytest.raises(OfflineError, match="is missing; add it by a file of `--join`"):
        import_dump(source, tmp_path / "run", metadata={"vocab_size": 10})


def test_what_the_engine_did_not_say_is_a_fault_with_its_reason(tmp_path: Path) -> None:
    broken = json.loads(json.dumps(TWO))
    broken["meta_info"]["output_token_logprobs"][1][0] = None
    broken["meta_info"]["output_top_logprobs"][1] = None
    source = EngineFiles("sglang", [write_json(tmp_path / "rollout.jsonl", [ONE, broken])])
    with pytest.raises(OfflineError, match=r"line 2, sequence 1, position 1, .*not say it \(null"):
        import_dump(
            source,
            tmp_path / "run",
            join=ScoringFiles([write_json(tmp_path / "adv.jsonl", ADVANTAGES[:1])]),
            metadata={"vocab_size": 10},
        )


def test_log_probs_before_the_temperature_are_refused(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rollout.jsonl", [TWO])
    for options, said in (
        ({"temperature": 0.7}, r"'raw' and the temperature is 0\.7"),
        ({}, "unkn"),
    ):
        source = EngineFiles("sglang", [path], mode="raw", **options)  # type: ignore[arg-type]
        with pytest.raises(OfflineError, match=said):
            import_dump(source, tmp_path / "run", metadata={"vocab_size": 10})


def test_a_shape_that_is_none_is_named_by_line(tmp_path: Path) -> None:
    source = EngineFiles("sglang", [write_json(tmp_path / "rollout.jsonl", [ONE, {"text": "a"}])])
    with pytest.raises(OfflineError, match=r"rollout\.jsonl, line 2"):
        import_dump(
            source,
            tmp_path / "run",
            join=ScoringFiles([write_json(tmp_path / "adv.jsonl", ADVANTAGES[:1])]),
            metadata={"vocab_size": 10},
        )
    with pytest.raises(OfflineError, match="must be one of vllm, sglang"):
        EngineFiles("other", [tmp_path])
    with pytest.raises(OfflineError, match="`mode` must be one of raw"):
        EngineFiles("sglang", [tmp_path], mode="cooked")
    (tmp_path / "half.json").write_text("[", encoding="utf-8")
    with pytest.raises(OfflineError, match="must be JSON"):
        EngineFiles("sglang", [tmp_path / "half.json"])


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("vllm", "vllm_offline_processed_top5"),
        ("openai", "vllm_processed_server_completions_ids"),
    ],
)
def test_what_a_real_vllm_returned_becomes_a_dump(engine: str, name: str, tmp_path: Path) -> None:
    path = ROOT / "tests" / "fixtures" / "engines" / f"{name}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    source = EngineFiles(engine, [path], mode="processed")
    count = sum(1 for _ in source.records(Faults()))
    advantages = [{"sequence": number, "advantage": 0.5} for number in range(count)]
    import_dump(
        source,
        tmp_path / "run",
        join=ScoringFiles([write_json(tmp_path / "adv.jsonl", advantages)]),
        metadata={"vocab_size": 64, "behavior": source.behavior},
    )
    rows = rows_of(tmp_path / "run", "actual", 0)
    if engine == "vllm":
        wanted = [
            (token, entry[str(token)]["logprob"])
            for output in found["outputs"]
            for token, entry in zip(output["token_ids"], output["logprobs"], strict=True)
        ]
    else:
        wanted = [
            (int(token.removeprefix("token_id:")), logprob)
            for choice in found["choices"]
            for token, logprob in zip(
                choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True
            )
        ]
    assert [(row["token_id"], row["behavior_logprob"]) for row in rows] == [
        (token, float(np.float32(logprob))) for token, logprob in wanted
    ]
    assert not check_dump(tmp_path / "run")
