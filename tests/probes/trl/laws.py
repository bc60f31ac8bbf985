"""What must hold of every probed training, whatever the trainer's version and settings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltad.dumps import Dump, check_dump
from tests.probes.trl import trainers

KEY = ["sequence", "position"]


@dataclass
class Pair:
    """The same training twice: as it is, and with the probe."""

    plain: Any
    probed: Any
    attached: Any
    witness: trainers.Witness
    run: Path

    @property
    def rows(self) -> Any:
        return trainers.rows(self.run)


def train(made: Any, **how: Any) -> None:
    """Train; what TRL and transformers warn of is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.train(**how)


def build(folder: Path, **options: Any) -> Any:
    """Make a trainer; what TRL and transformers warn of is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainers.trainer(folder, **options)


def pair(folder: Path, *, prepare: Any = None, how: Any = None, **options: Any) -> Pair:
    """Train with and without the probe; `prepare` is done to both trainers first."""
    from deltad.probes.trl import attach

    policy = options.pop("policy", None)

    def made(name: str) -> Any:
        trainer = build(folder / name, policy=policy and policy(), **options)
        if prepare is not None:
            prepare(trainer)
        return trainer

    plain = made("plain")  # its generators are seeded when it is made
    train(plain)
    probed = made("probed")
    witness = trainers.Witness(probed)
    attached = attach(probed, folder / "run", **(how or {}))
    train(probed)
    return Pair(plain, probed, attached, witness, folder / "run")


def nothing_changes(each: Pair) -> None:
    """Logs and weights are bit for bit those without the probe."""
    assert trainers.logs(each.plain) == trainers.logs(each.probed)
    assert len(trainers.logs(each.plain)) > 1
    first, second = trainers.weights(each.plain), trainers.weights(each.probed)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def the_dump_is_in_order(found: Pair | Path) -> None:
    """`deltad check` finds nothing."""
    run = found.run if isinstance(found, Pair) else found
    assert Dump.open(run).arms == ("actual",)
    assert check_dump(run, strict=False) == []


def on_policy_steps_have_no_divergence(
    each: Pair, steps: tuple[int, ...], *, least: int = 30
) -> None:
    """μ is π, bit for bit, in the steps that train on what the policy has just generated."""
    found = each.rows
    for step in steps:
        taken = found[found.step == step]
        assert len(taken) > least
        assert (taken.pre_logprob == taken.behavior_logprob).all()
        np.testing.assert_array_equal(
            np.stack(taken.topk_pre_logprobs), np.stack(taken.topk_behavior_logprobs)
        )
        assert (taken.post_logprob != taken.pre_logprob).any()


def a_stale_step_begins_where_the_last_ended(each: Pair, first: int, *, least: int = 30) -> None:
    """D_pre of step t + 1 is D_post of step t, bit for bit, token by token."""
    found = each.rows
    one = found[found.step == first].set_index(KEY).sort_index()
    two = found[found.step == first + 1].set_index(KEY).sort_index()
    assert len(one) > least
    assert one.index.equals(two.index)
    for name in ("behavior_logprob", "token_id", "advantage", "group"):
        assert (one[name] == two[name]).all()
    assert (one.post_logprob == two.pre_logprob).all()
    assert (one.post_collision == two.pre_collision).all()
    np.testing.assert_array_equal(np.stack(one.topk_post_logprobs), np.stack(two.topk_pre_logprobs))
    assert (two.pre_logprob != two.behavior_logprob).any()


def rows_are_those_of_a_forward_of_our_own(
    each: Pair, generated_at: dict[int, int], *, temperature: float = 0.7, within: float = 2e-5
) -> None:
    """μ, π before and π after, at the sampled tokens and the top-K, by a plain model."""
    found = each.rows
    for step, born in generated_at.items():
        taken = found[found.step == step].reset_index(drop=True)
        at = 0
        for inputs in each.witness.batches[step]:
            mask = inputs["completion_mask"].bool()
            if "tool_mask" in inputs:
                mask &= inputs["tool_mask"].bool()
            count = int(mask.sum())
            part = taken.iloc[at : at + count]
            at += count
            ids = inputs["completion_ids"][mask].numpy()
            assert (part.token_id == ids).all()
            advantages = inputs["advantages"][:, None].expand_as(mask)[mask].numpy()
            assert (part.advantage == advantages).all()
            topk = np.stack(part.topk_ids)
            for when, state in (
                ("behavior", each.witness.before[born]),
                ("pre", each.witness.before[step]),
                ("post", each.witness.after[step]),
            ):
                whole = trainers.logprobs(state, inputs, temperature=temperature)[mask].numpy()
                own = np.take_along_axis(whole, ids[:, None], 1)[:, 0]
                np.testing.assert_allclose(part[f"{when}_logprob"], own, atol=within)
                listed = np.stack(part[f"topk_{when}_logprobs"])
                np.testing.assert_allclose(listed, np.take_along_axis(whole, topk, 1), atol=within)
                if when == "behavior":
                    best = -np.sort(-whole, 1)[:, : topk.shape[1]]
                    np.testing.assert_allclose(listed, best, atol=within)
                else:
                    np.testing.assert_allclose(
                        part[f"{when}_collision"], (np.exp(whole) ** 2).sum(1), atol=within
                    )
        assert at == len(taken)


def groups_are_prompts(each: Pair) -> None:
    """Rows of one group are completions of one prompt, as many as are generated for it."""
    prompts: dict[int, set[tuple[int, ...]]] = {}
    found = each.rows
    for step, batches in each.witness.batches.items():
        taken = found[found.step == step]
        order = taken.drop_duplicates("sequence")[["sequence", "group"]].to_numpy()
        texts = [
            tuple(ids[mask.bool()].tolist())
            for inputs in batches
            for ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        ]
        assert len(texts) == len(order)
        for text, (_, group) in zip(texts, order, strict=True):
            prompts.setdefault(int(group), set()).add(text)
    assert all(len(texts) == 1 for texts in prompts.values())
    sizes = found.groupby("group").sequence.nunique()
    assert (sizes == each.probed.num_generations).all()


def divergence(rows: Any) -> np.ndarray[Any, Any]:
    """Top-K KL divergence before the step, in nats: an oracle for a few rows."""
    found = []
    for _, row in rows.iterrows():
        mu, pi = (
            dict(zip(row.topk_ids, np.exp(row[name].astype(float)), strict=True))
            for name in ("topk_behavior_logprobs", "topk_pre_logprobs")
        )
        mu.setdefault(row.token_id, np.exp(float(row.behavior_logprob)))
        pi.setdefault(row.token_id, np.exp(float(row.pre_logprob)))
        rest = [max(0.0, 1 - sum(each.values())) for each in (mu, pi)]
        terms = [mu[name] * np.log(mu[name] / pi[name]) for name in mu]
        tail = rest[0] * np.log(rest[0] / max(rest[1], 1e-12)) if rest[0] else 0.0
        found.append(sum(terms) + tail)
    return np.array(found)
