"""The kernels themselves; importing this module imports Triton."""

# Triton reads these functions' source: annotations other than constexpr mean nothing to it.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

PAST: tl.constexpr = tl.constexpr(2**31 - 1)
"""No id: stands behind the last of a token."""

FLOOR: tl.constexpr = tl.constexpr(-1e4)
"""A logit so far below the pivot weighs nothing; it keeps 0 · −∞ out of the entropy."""


@triton.jit
def policy_logit(
    z, scale, softcap, inverse_temperature, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """The logit z of the head at the temperature: c tanh(s z / c) / T."""
    if HAS_SCALE:
        z = z * scale
    if HAS_SOFTCAP:
        z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)  # tanh
    return z * inverse_temperature


@triton.jit
def dots_kernel(
    hidden, weight, ids, bias, logits, spreads,
    id_count, width, hidden_stride, weight_stride,
    scale, softcap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_IDS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """Logits of one token at up to BLOCK_IDS ids, NaN at padding; and how far they may round.

    One program a token and block of ids. Products are exact in float32 for half-precision
    inputs; BLOCK_HIDDEN partial sums a dot are added up at the end.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slots = block * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    wanted = tl.load(ids + token * id_count + slots, mask=slots < id_count, other=-1)
    used = wanted >= 0
    rows = tl.where(used, wanted, 0).to(tl.int64)
    sums = tl.zeros((BLOCK_IDS, BLOCK_HIDDEN), tl.float32)
    squares = tl.zeros((BLOCK_IDS, BLOCK_HIDDEN), tl.float32)
    for start in range(0, width, BLOCK_HIDDEN):
        columns = start + tl.arange(0, BLOCK_HIDDEN)
        inside = columns < width
        h = tl.load(hidden + token * hidden_stride + columns, mask=inside, other=0.0)
        w = tl.load(
            weight + rows[:, None] * weight_stride + columns[None, :],
            mask=used[:, None] & inside[None, :],
            other=0.0,
        )
        product = w.to(tl.float32) * h.to(tl.float32)[None, :]
        sums += product
        squares += product * product
    z = tl.sum(sums, 1)
    if HAS_BIAS:
        z += tl.load(bias + rows, mask=used, other=0.0).to(tl.float32)
    z = policy_logit(z, scale, softcap, inverse_temperature, HAS_SCALE, HAS_SOFTCAP)
    nothing = tl.full((BLOCK_IDS,), float("nan"), tl.float32)
    tl.store(logits + token * id_count + slots, tl.where(used, z, nothing), mask=slots < id_count)
    spread = tl.sqrt(tl.max(tl.where(used, tl.sum(squares, 1), 0.0), 0))
    tl.store(spreads + token * tl.num_programs(1) + block, spread)


@triton.jit
def sums_kernel(
    hidden, weight, sorted_ids, bias, pivot, totals, squares, weights,
    tokens, vocab, id_count, width, hidden_stride, weight_stride,
    scale, softcap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    COLLISION: tl.constexpr, ENTROPY: tl.constexpr, WIDEN: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """Sums over SPLIT ids, those asked for left out, of BLOCK_TOKENS tokens.

    One program for each; it writes partial sums to a place of its own, so nothing is added in an
    order that may change. A token's sums do not depend on which others are in the batch.
    """
    rows = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    split = tl.program_id(1)
    present = rows < tokens
    rows_64 = rows.to(tl.int64)
    m = tl.load(pivot + rows, mask=present, other=0.0)
    total = tl.zeros((BLOCK_TOKENS,), tl.float32)
    square = tl.zeros((BLOCK_TOKENS,), tl.float32)
    weighted = tl.zeros((BLOCK_TOKENS,), tl.float32)

    # Each token walks through its sorted ids as the tiles pass them.
    first = split * SPLIT
    slot = tl.zeros((BLOCK_TOKENS,), tl.int32)
    following = tl.load(
        sorted_ids + rows_64 * id_count + slot, mask=present & (slot < id_count), other=PAST
    )
    while tl.min(following, 0) < first:
        slot += (following < first).to(tl.int32)
        following = tl.load(
            sorted_ids + rows_64 * id_count + slot, mask=present & (slot < id_count), other=PAST
        )

    for start in range(first, tl.minimum(first + SPLIT, vocab), BLOCK_VOCAB):
        columns = start + tl.arange(0, BLOCK_VOCAB)
        known = columns < vocab
        columns_64 = columns.to(tl.int64)
        z = tl.zeros((BLOCK_TOKENS, BLOCK_VOCAB), tl.float32)
        for place in range(0, width, BLOCK_HIDDEN):
            inner = place + tl.arange(0, BLOCK_HIDDEN)
            inside = inner < width
            h = tl.load(
                hidden + rows_64[:, None] * hidden_stride + inner[None, :],
                mask=present[:, None] & inside[None, :],
                other=0.0,
            )
            w = tl.load(
                weight + columns_64[None, :] * weight_stride + inner[:, None],
                mask=known[None, :] & inside[:, None],
                other=0.0,
            )
            if WIDEN:
                h = h.to(tl.float32)
                w = w.to(tl.float32)
            z = tl.dot(h, w, z, input_precision="ieee")
        if HAS_BIAS:
            z += tl.load(bias + columns, mask=known, other=0.0).to(tl.float32)[None, :]
        z = policy_logit(z, scale, softcap, inverse_temperature, HAS_SCALE, HAS_SOFTCAP)
        z = tl.where(known[None, :], z - m[:, None], float("-inf"))
        end = start + BLOCK_VOCAB
        while tl.min(following, 0) < end:
            z = tl.where(columns[None, :] == following[:, None], float("-inf"), z)
            slot += (following < end).to(tl.int32)
            following = tl.load(
                sorted_ids + rows_64 * id_count + slot,
                mask=present & (slot < id_count),
                other=PAST,
            )
        e = tl.exp(z)
        total += tl.sum(e, 1)
        if COLLISION:
            square += tl.sum(e * e, 1)
        if ENTROPY:
            weighted += tl.sum(e * tl.maximum(z, FLOOR), 1)
    place = split.to(tl.int64) * tokens + rows
    tl.store(totals + place, total, mask=present)
    if COLLISION:
        tl.store(squares + place, square, mask=present)
    if ENTROPY:
        tl.store(weights + place, weighted, mask=present)
