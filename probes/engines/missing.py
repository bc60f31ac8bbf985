"""The words of a response: modes, supports, and why something is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["raw", "tempered", "processed", "unknown"]
"""What the engine had done to the logits: nothing; divided them by the temperature; that and cut
them by top-p, top-k or min-p; or it is not known."""

SupportRule = Literal["union", "replaced-last"]
"""Whether the list is the top-K, or the sampled token has taken the place of the K-th."""

Field = Literal["token_id", "logprob", "topk"]
"""What is missing: a sampled token's id, its log-prob, or an entry of its list."""

Reason = Literal[
    "null", "nan", "minus-infinity", "sentinel", "truncated", "ambiguous-text", "unknown-text",
    "collision", "no-ids", "not-returned",
]  # fmt: skip
"""Why something is missing.

`null`: JSON null, Python None. `nan`: not a number. `minus-infinity`: −∞ for a token that was
sampled. `sentinel`: a number that stands for "none", as −9999. `truncated`: −∞ in the list, an id
that top-p, top-k or min-p had cut; its probability is 0. `ambiguous-text`: several ids have this
text. `unknown-text`: no id has it. `collision`: two ids of a list had one text, and the engine
kept one of them. `no-ids`: text alone was returned. `not-returned`: the engine gave none here.
"""


@dataclass(frozen=True)
class Missing:
    """Something that the engine did not say, and why.

    Attributes
    ----------
    position : int or None
        Token within the response, from 0; None where it concerns every token.
    field : str
        `token_id`, `logprob` or `topk`.
    reason : str
        One of `Reason`.
    count : int
        Entries concerned.
    detail : str
        The value that came, or the texts concerned.
    """

    position: int | None
    field: Field
    reason: Reason
    count: int = 1
    detail: str = ""
