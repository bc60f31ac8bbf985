"""Rows of the benchmark: what the probe adds to a training step of SmolLM2's shape.

A step is forward, backward and AdamW on four responses of 256 tokens to one prompt of 128, in
float32; the weights are random, which changes no time. The probe's time is what is spent in its
hooks, in steps that are otherwise those of training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.masks import Tokens

from .row import Row, missing

ROUNDS: Final = 5
OUTSIDE: Final = 0.0144
DISAGREEMENT: Final = 0.00082
"""Shares of the tokens, of the paper's runs; where they lie is drawn at random."""

PLACEMENTS: Final = 4
"""Draws a round of what is too rare to be met in one."""

EVERY: Final = 4
TOP_K: Final = 20


@dataclass(frozen=True)
class Shape:
    """Sizes of model and batch."""

    hidden: int = 576
    intermediate: int = 1536
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    vocab: int = 49152
    batch: int = 4
    prompt: int = 128
    response: int = 256


QUICK: Final = Shape(64, 128, 2, 4, 2, 512, 4, 16, 32)

_WHAT: Final = {
    "P1 logits": ("before, from existing logits", 0.015),
    "P1 hidden": ("before, from hidden states", 0.05),
    "P2": ("everything, every step", 0.38),
    "P3": ("after, outside tokens only", 0.29),
    "P3 shared": ("after, outside tokens only, the prompt forwarded once", 0.23),
    "P4": ("after, disagreement tokens only", 0.15),
    "P5 idle": ("a step with a probe attached and idle", 1.005),
    "P5 every": (f"everything, every {EVERY}th step", 0.38 / EVERY + 0.005),
}


def rows(prefixes: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Measure the rows whose ids begin with one of the prefixes, all without any."""
    wanted = [name for name in _WHAT if not prefixes or name.startswith(prefixes)]
    if not wanted:
        return
    try:
        bench = _Bench(QUICK if quick else Shape())
    except ImportError as error:
        for name in wanted:
            yield missing(name, _WHAT[name][0], _WHAT[name][1], f"not installed: {error.name}")
        return
    found = [bench.round(seed) for seed in range(ROUNDS)]
    step = statistics.median(each["step"] for each in found)
    for name in wanted:
        what, limit = _WHAT[name]
        ratios = [each[name] / each["step"] for each in found]
        yield Row(
            id=name,
            what=f"{what}, against a training step",
            limit=limit,
            # What is drawn at random differs from round to round by more than its time does.
            figure=statistics.fmean(ratios) if name == "P4" else statistics.median(ratios),
            spread=(min(ratios), max(ratios)),
            note=f"step {step:.2f} s" + bench.notes.get(name, ""),
        )


class _Clock:
    """CPU time spent in some functions, those that they call included once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, owner: Any, *names: str) -> None:
        """Count what these methods of an object take."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def take(self) -> float:
        """Seconds since the last time."""
        found, self.seconds = self.seconds, 0.0
        return found

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - begin

        return timed


class _Placed:
    """A selection that decides as it does, and then takes tokens drawn at random."""

    def __init__(self, selection: Any, share: float) -> None:
        self._selection = selection
        self._share = share
        self.generator = np.random.default_rng(0)
        self.mask: NDArray[np.bool_] | None = None
        self.drawn_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selection, name)

    def draw(self, size: int) -> None:
        """Draw the tokens of the next micro-batch."""
        self.mask = self.generator.random(size) < self._share
        self.drawn_tokens += int(self.mask.sum())

    def wanted(self, tokens: Tokens, *, slack: float = 0.0) -> NDArray[np.bool_]:
        """Those drawn."""
        decided: NDArray[np.bool_] = self._selection.wanted(tokens, slack=slack)
        if self.mask is None or len(self.mask) != len(decided):
            return np.ones_like(decided)
        return self.mask


class _Bench:
    """A model, a batch, and a probe of each kind."""

    def __init__(self, shape: Shape) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self._torch, self._shape = torch, shape
        self._model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab,
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                tie_word_embeddings=True,
            )
        ).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        self._ids, self._tokens = self._batch(shape.response)
        self._few = self._batch(8)
        self.notes: dict[str, str] = {}
        self._recorded = 0
        self._probes = {
            "all": self._probe(),
            "outside": self._probe(keep="outside"),
            "shared": self._probe(keep="outside", share_prompts=True),
            "disagreement": self._probe(keep="disagreement"),
            "idle": self._probe(every=2, step=1),
        }
        self._placed = {
            name: _Placed(probe.selection, DISAGREEMENT if name == "disagreement" else OUTSIDE)
            for name, probe in self._probes.items()
            if probe.selection.keep != "all"
        }
        for name, placed in self._placed.items():
            self._probes[name]._reader._cutter._selection = placed
        self._clocks = {name: _attach(probe) for name, probe in self._probes.items()}
        # What every probe tries once, and the optimizer's state, on a batch that is soon done.
        for name in self._probes:
            self._step(name, backward=True, few=True)
        for clocks in self._clocks.values():
            clocks["probe"].take()

    def round(self, seed: int) -> dict[str, float]:
        """Seconds of one step and of what each kind of probe adds to it."""
        for placed in self._placed.values():
            placed.generator = np.random.default_rng([seed, 1])
            placed.draw(self._shape.batch * self._shape.response)
        found: dict[str, float] = {}
        whole, before = self._step("all", backward=True)
        added = self._clocks["all"]["probe"].take()
        found |= {"step": whole - added, "P2": added, "P1 hidden": before}
        for name, row in (("outside", "P3"), ("shared", "P3 shared")):
            self._recorded = 0
            _, before = self._step(name)
            drawn = self._placed[name].mask
            if drawn is None or self._recorded != int(drawn.sum()):
                raise RuntimeError(f"{row} recorded {self._recorded} tokens, not those drawn")
            found[row] = self._clocks[name]["probe"].take()
            if name == "outside":
                found["P1 logits"] = before
        found["P4"] = self._rare()
        self._step("idle", few=True)
        idle = self._clocks["idle"]["probe"].take()
        found["P5 idle"] = found["step"] + idle
        found["P5 every"] = (found["P2"] + (EVERY - 1) * idle) / EVERY
        return found

    def _step(self, name: str, *, backward: bool = False, few: bool = False) -> tuple[float, float]:
        """One step under a probe: CPU seconds of all of it, and of reading *pre*."""
        probe, clocks = self._probes[name], self._clocks[name]
        begin = time.process_time()
        if name == "idle":
            probe.step = 1
        with probe:
            loss = self._forward(probe, few=few)
            if backward:
                self._optimizer.zero_grad()
                loss.backward()
            del loss
            self._optimizer.step()
        return time.process_time() - begin, clocks["before"].take()

    def _rare(self) -> float:
        """Mean of what disagreement tokens cost, over several draws of them."""
        name = "disagreement"
        probe, clocks, placed = self._probes[name], self._clocks[name], self._placed[name]
        size = self._shape.batch * self._shape.response
        with probe:
            self._forward(probe)
            total = clocks["probe"].take()
            (batch,) = probe.pending
            forward = batch.forward
            choosing = 0.0
            for _ in range(PLACEMENTS):
                placed.draw(size)
                begin = time.process_time()
                if forward is not None:
                    probe._reader.choose(batch, forward, 0)
                    batch.complete(probe._reader.after(batch, forward))
                choosing += time.process_time() - begin
            probe.discard()
        clocks["probe"].take()
        clocks["before"].take()
        self.notes["P4"] = f", {placed.drawn_tokens} tokens in all draws"
        # The forward's own choice is among the rest, and is counted twice.
        return total + choosing / PLACEMENTS

    def _forward(self, probe: Any, *, few: bool = False) -> Any:
        """The training forward and its loss."""
        torch = self._torch
        ids, tokens = self._few if few else (self._ids, self._tokens)
        response = ids.shape[1] - self._shape.prompt
        probe.expect(tokens)
        logits = self._model(ids, logits_to_keep=response + 1, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1)
        taken = logprobs.gather(-1, ids[:, -response:, None])[..., 0]
        return -(taken * tokens.advantages[:, None]).mean()

    def _batch(self, response: int) -> tuple[Any, Any]:
        """Responses to one prompt; the behavior policy gives each id the same."""
        from deltad.probes import ResponseTokens

        torch, shape = self._torch, self._shape
        length = shape.prompt + response
        input_ids = torch.randint(shape.vocab, (shape.batch, length))
        input_ids[:, : shape.prompt] = input_ids[0, : shape.prompt].clone()
        mask = torch.zeros(shape.batch, length, dtype=torch.bool)
        mask[:, shape.prompt :] = True
        ids = torch.rand(shape.batch, length, shape.vocab // 8).topk(TOP_K).indices
        uniform = -float(np.log(shape.vocab))
        tokens = ResponseTokens(
            response_mask=mask,
            advantages=torch.linspace(-1, 1, shape.batch),
            behavior_logprobs=torch.full((shape.batch, length), uniform),
            topk_ids=ids,
            topk_logprobs=torch.full((shape.batch, length, TOP_K), uniform),
            sequence=torch.arange(shape.batch),
            group=torch.zeros(shape.batch, dtype=torch.long),
        )
        return input_ids, tokens

    def _probe(self, **options: Any) -> Any:
        """A probe whose rows are dropped."""
        from deltad.probes import UpdateProbe

        def record(arm: str, rows: Any) -> None:
            self._recorded += len(rows["step"])

        return UpdateProbe(self._model, self._optimizer, record, **options)


def _attach(probe: Any) -> dict[str, _Clock]:
    """Clocks of all that a probe does, and of reading *pre*."""
    clocks = {"probe": _Clock(), "before": _Clock()}
    clocks["before"].around(probe._reader, "before")
    hooks = ("_enter", "_leave", "_enter_body", "_leave_body", "_enter_head", "_leave_head")
    clocks["probe"].around(probe._watcher, *hooks)
    clocks["probe"].around(probe, "expect", "_before_step", "_after_step")
    return clocks
