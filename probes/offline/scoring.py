"""Scoring with a model of one's own: the policy's log-probs where `scoring_requests` wants them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .faults import Faults, OfflineError
from .files import json_lines

if TYPE_CHECKING:
    import torch


def read_requests(path: str | Path) -> Iterator[dict[str, Any]]:
    """Read the requests of a file.

    Parameters
    ----------
    path : str or Path
        JSON lines, as `deltad import --requests` writes them.

    Yields
    ------
    dict
        As `scoring_requests` gives them.

    Raises
    ------
    OfflineError
        A line that is no object.
    """
    faults = Faults()
    for _, request in json_lines(Path(path), faults):
        faults.check()
        yield request
    faults.check()


def score(
    model: torch.nn.Module,
    requests: Iterable[Mapping[str, Any]],
    *,
    temperature: float = 1.0,
    batch_size: int = 8,
    token_chunk: int = 512,
    vocab_chunk: int = 4096,
) -> Iterator[dict[str, Any]]:
    """Score responses by the readout of deltad's own probe.

    Call it before the step and after it, with the same model in the same mode and with the same
    requests in the same order: the forwards then have the same shapes, and what differs is the
    step.

    Parameters
    ----------
    model : nn.Module
        A causal LM of transformers, in the mode in which it is to be read (as a rule `eval()`).
    requests : iterable of mappings
        As `scoring_requests` gives them, with `prompt_ids`.
    temperature : float
        Sampling temperature, > 0.
    batch_size : int
        Responses a forward.
    token_chunk, vocab_chunk : int
        Sides of a tile of logits.

    Yields
    ------
    dict
        `step`, `sequence`, `logprob`, `topk_logprobs`, `collision` and `entropy`: a record of a
        file of scores.

    Raises
    ------
    OfflineError
        A request without prompt, or a head that the forward does not call.
    ProbeError
        A head or a readout that is not understood; see `deltad.probes.head`.

    Notes
    -----
    The head is applied by `deltad.probes.readout`: float32 products, log-sum-exp without
    rounded logits; the first request is compared with the model's own logits. Responses are
    padded on the right, behind everything that is read.
    """
    waiting = iter(requests)
    compare = True
    while group := list(islice(waiting, batch_size)):
        yield from _score(
            model, group, temperature=temperature, token_chunk=token_chunk,
            vocab_chunk=vocab_chunk, compare=compare,
        )  # fmt: skip
        compare = False


def write_scores(path: str | Path, scores: Iterable[Mapping[str, Any]]) -> int:
    """Write scores as JSON lines.

    Parameters
    ----------
    path : str or Path
        Written anew.
    scores : iterable of mappings
        As `score` gives them.

    Returns
    -------
    int
        Responses.
    """
    count = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for record in scores:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            count += 1
    return count


def _score(
    model: torch.nn.Module,
    group: Sequence[Mapping[str, Any]],
    *,
    temperature: float,
    token_chunk: int,
    vocab_chunk: int,
    compare: bool,
) -> Iterator[dict[str, Any]]:
    """Score the responses of one forward."""
    import torch

    from deltad.probes.head import Head

    head = Head.of(model)
    device = head.weight.device
    texts = [_text(request) for request in group]
    length = max(map(len, texts))
    ids = torch.zeros(len(texts), length, dtype=torch.long)
    attended = torch.zeros(len(texts), length, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        attended[row, : len(text)] = 1
    hidden, logits = _forward(model, head.module, ids.to(device), attended.to(device), compare)
    wanted = [
        [*(some or ()), token]
        for request in group
        for some, token in zip(request["ids"], request["token_id"], strict=True)
    ]
    width = max(map(len, wanted))
    padded = torch.tensor([[-1] * (width - len(each)) + each for each in wanted], device=device)
    # Token t of a response is predicted at the place before it.
    starts = [
        len(text) - len(each["token_id"]) - 1 for text, each in zip(texts, group, strict=True)
    ]
    counts = [len(request["token_id"]) for request in group]
    states = torch.cat(
        [
            hidden[row, start : start + count]
            for row, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
    )
    read = head.read(
        states,
        padded,
        temperature=temperature,
        token_chunk=token_chunk,
        vocab_chunk=vocab_chunk,
        entropy=True,
    )
    if logits is not None:
        some = min(8, counts[0])
        head.check_against(
            logits[0, starts[0] : starts[0] + some], read.logprobs[:some], padded[:some],
            temperature=temperature, dtypes={logits.dtype, hidden.dtype},
        )  # fmt: skip
    logprobs, collision, entropy = (
        [] if each is None else each.tolist()
        for each in (read.logprobs, read.collision, read.entropy)
    )
    first = 0
    for request, count in zip(group, counts, strict=True):
        rows = slice(first, first + count)
        yield {
            "step": request["step"],
            "sequence": request["sequence"],
            "logprob": [row[-1] for row in logprobs[rows]],
            "topk_logprobs": [
                None if some is None else row[width - 1 - len(some) : -1]
                for some, row in zip(request["ids"], logprobs[rows], strict=True)
            ],
            "collision": collision[rows],
            "entropy": entropy[rows],
        }
        first += count


def _text(request: Mapping[str, Any]) -> list[int]:
    """Prompt and response."""
    prompt = request.get("prompt_ids")
    if not prompt:
        raise OfflineError(
            f"sequence {request.get('sequence')} has no `prompt_ids`, so the model cannot be asked "
            "for it: give them in the behavior files, or put them into the requests"
        )
    return list(chain(prompt, request["token_id"]))


def _forward(
    model: torch.nn.Module,
    head: torch.nn.Module,
    ids: torch.Tensor,
    attended: torch.Tensor,
    compare: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What enters the head, and the model's own logits where they are wanted."""
    import torch

    seen: list[torch.Tensor] = []

    def look(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        seen.append(args[0])
        # Logits of one position are enough where nobody compares them.
        return None if compare else (args[0][..., :1, :],)

    handle = head.register_forward_pre_hook(look)
    try:
        with torch.no_grad():
            output = model(input_ids=ids, attention_mask=attended, use_cache=False)
    finally:
        handle.remove()
    if len(seen) != 1:
        raise OfflineError(
            f"the model called its head {len(seen)} times in a forward, expected once: score with "
            "the plain model of transformers"
        )
    return seen[0], output.logits if compare else None
