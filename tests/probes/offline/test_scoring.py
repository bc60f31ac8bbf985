"""Requests say what to score, and `score` answers them by the probe's readout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deltad.dumps import DERIVED, Dump, check_dump
from deltad.probes.offline import (
    OfflineError,
    ScoringFiles,
    import_dump,
    read_requests,
    score,
    scoring_requests,
    write_requests,
    write_scores,
)
from tests.probes.offline.exported import rows_of, write_json
from tests.probes.tiny import FAMILIES, VOCAB, tiny

TEMPERATURE = 0.7


def responses(model: Any, *, count: int = 5) -> list[dict[str, Any]]:
    """Responses of unequal length that the model sampled, with a tool's token in one of them."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        prompt = torch.randint(3, VOCAB, (3 + number % 2,), generator=generator)
        tokens = torch.randint(3, VOCAB, (2 + number % 3,), generator=generator)
        logprobs = _logprobs(model, prompt, tokens)
        best = logprobs.topk(3, -1)
        record: dict[str, Any] = {
            "sequence": number,
            "group": number // 2,
            "prompt_ids": prompt.tolist(),
            "token_id": tokens.tolist(),
            "advantage": 1.0 - number,
            "behavior_logprob": logprobs.gather(1, tokens[:, None])[:, 0].tolist(),
            "topk_ids": best.indices.tolist(),
            "topk_behavior_logprobs": best.values.tolist(),
        }
        if number == 1:
            record["response_mask"] = [True, False, *[True] * (len(tokens) - 2)]
            record["topk_ids"][1] = record["topk_behavior_logprobs"][1] = None
        else:
            record["response_mask"] = [True] * len(tokens)
        found.append(record)
    return found


def _logprobs(model: Any, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs at every place of a response, from the model's own logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, tokens])[None]).logits[0].double()
    found: torch.Tensor = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_models_own_log_probs(family: str, tmp_path: Path) -> None:
    model = tiny(family).eval()
    given = responses(model)
    source = ScoringFiles([write_json(tmp_path / "behavior.jsonl", given)], step=2)
    scores = list(score(model, scoring_requests(source), temperature=TEMPERATURE, batch_size=2))
    assert [each["sequence"] for each in scores] == [each["sequence"] for each in given]
    for record, found in zip(given, scores, strict=True):
        assert found["step"] == 2
        prompt, tokens = (torch.tensor(record[name]) for name in ("prompt_ids", "token_id"))
        logprobs = _logprobs(model, prompt, tokens)
        probs = logprobs.exp()
        for at, token in enumerate(tokens.tolist()):
            assert found["logprob"][at] == pytest.approx(float(logprobs[at, token]), abs=2e-5)
            assert found["collision"][at] == pytest.approx(float((probs[at] ** 2).sum()), abs=1e-5)
            entropy = float(-(probs[at] * logprobs[at]).sum())
            assert found["entropy"][at] == pytest.approx(entropy, abs=1e-4)
            ids = record["topk_ids"][at]
            if ids is None:
                assert found["topk_logprobs"][at] is None
            else:
                wanted = logprobs[at, ids].tolist()
                assert found["topk_logprobs"][at] == pytest.approx(wanted, abs=2e-5)


def test_the_way_from_responses_to_a_dump(tmp_path: Path) -> None:
    model = tiny().eval()
    behavior = write_json(tmp_path / "behavior.jsonl", responses(model))
    with (tmp_path / "requests.jsonl").open("wb") as file:
        assert write_requests(ScoringFiles([behavior]), file) == 5
    paths = {}
    for time in ("pre", "post"):
        found = score(model, read_requests(tmp_path / "requests.jsonl"), temperature=TEMPERATURE)
        paths[time] = tmp_path / f"{time}.jsonl"
        assert write_scores(paths[time], found) == 5
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    done = import_dump(
        ScoringFiles([behavior]),
        tmp_path / "run",
        pre=ScoringFiles([paths["pre"]], score=True),
        post=ScoringFiles([paths["post"]], score=True),
        metadata={"vocab_size": VOCAB, "temperature": TEMPERATURE},
    )
    assert done.left_out == 1
    assert not check_dump(tmp_path / "run")
    rows = rows_of(tmp_path / "run", "actual", 0)
    # The behavior policy is the policy before the step, by its own logits.
    assert all(abs(row["pre_logprob"] - row["behavior_logprob"]) < 1e-4 for row in rows)
    assert any(row["post_logprob"] != row["pre_logprob"] for row in rows)
    columns = Dump.open(tmp_path / "run").optional_columns("actual")
    assert set(DERIVED) <= columns
    assert columns - set(DERIVED) == {
        "pre_collision",
        "post_collision",
        "pre_entropy",
        "post_entropy",
    }


def test_hooks_are_gone_and_the_weights_are_as_they_were(tmp_path: Path) -> None:
    model = tiny().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    source = ScoringFiles([write_json(tmp_path / "behavior.jsonl", responses(model))])
    list(score(model, scoring_requests(source)))
    assert not model.get_output_embeddings()._forward_pre_hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_request_without_prompt_is_refused(tmp_path: Path) -> None:
    model = tiny().eval()
    given = responses(model)
    del given[2]["prompt_ids"]
    source = ScoringFiles([write_json(tmp_path / "behavior.jsonl", given)])
    with pytest.raises(OfflineError, match=r"sequence 2 has no `prompt_ids`"):
        list(score(model, scoring_requests(source)))


def test_responses_with_gaps_cannot_be_requested(tmp_path: Path) -> None:
    given = responses(tiny().eval())
    given[0]["position"] = [0, 2]
    del given[3]["token_id"]
    given[4]["sequence"] = 2
    source = ScoringFiles([write_json(tmp_path / "behavior.jsonl", given)])
    with pytest.raises(OfflineError) as caught:
        list(scoring_requests(source))
    first, second, third = map(str, caught.value.faults)
    assert "line 1, sequence 0, field `position`: must be 0, 1, 2, …" in first
    assert "line 4, sequence 3, field `token_id`: is missing" in second
    assert "line 5, sequence 2: occurs already" in third


def test_requests_are_lines_of_json_without_padding(tmp_path: Path) -> None:
    record = {"sequence": "a", "token_id": [5, 6], "topk_ids": [[5, -1], None], "prompt_ids": [1]}
    source = ScoringFiles([write_json(tmp_path / "behavior.jsonl", [record])], step=3)
    with (tmp_path / "requests.jsonl").open("wb") as file:
        write_requests(source, file)
    line = (tmp_path / "requests.jsonl").read_text(encoding="utf-8")
    assert json.loads(line) == {
        "step": 3, "sequence": "a", "prompt_ids": [1], "token_id": [5, 6], "ids": [[5], None],
    }  # fmt: skip
    (tmp_path / "requests.jsonl").write_text(line[:-4], encoding="utf-8")
    with pytest.raises(OfflineError, match="half written"):
        list(read_requests(tmp_path / "requests.jsonl"))
