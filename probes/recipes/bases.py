"""The base models that ship with the recipe `tiny`, so that everyone measures the same policies.

Pre-training on another processor rounds otherwise and ends at other weights. These ten were
pre-trained once, with the recipe's defaults and the seeds 0 to 9, and are kept in bfloat16.
`python -m deltad.probes.recipes.bases` pre-trains them anew.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from .recipe import RecipeError

SHA256: Final = (
    "86a62c90e5235c5005729e30c9a9bc50a67c7a0729f49897bc46162ee7fcc7fe",
    "5c295989b7c39456ec3b49e2b6d52fab1aa264d226f08051cb5adeed9fe386ab",
    "6aa15e447672d82e8dd03d71acfd5c7a49854c9d6c716b378e4e198830db7b93",
    "335bd67710b09eaf2e5ff7f1c57ad79b95bc8e51499cbaaca03a7aaacf9b2b92",
    "14999ec26453023f3801c56a339b221386b26b1740b0b8c76fcbf72f91479cd3",
    "ebec5f4c355be7528c204dad36b5c73fc17a88fdc7b3c5782ee2b022d3e10b80",
    "6befc66b2b3a12d78a666a58de5322acf5da48ebc9a2d99d969db40edb955726",
    "b96426bd4044682360664cac9b4ec18aea8894d480a3fd0d23d86c3fb7ad50db",
    "5b4be13b1b56904101815165511f2f3677876a77ac8c845095932cc76bc3ab56",
    "ea54017fb8db5d4015c4ea581a2c8eed63bf17faeb4df3ff97fac1b7c6b62a4f",
)
"""Checksum of each base's file, by its number."""

_FOLDER: Final = Path(__file__).with_name("bases")
_TIED: Final = "lm_head.weight"
"""Is the embedding, and kept once."""


def base_weights(number: int) -> dict[str, Tensor]:
    """Weights of a shipped base model, in float32.

    Raises
    ------
    RecipeError
        There is none of this number, or its file is missing or damaged.
    """
    from safetensors.torch import load

    if number not in range(len(SHA256)):
        raise RecipeError(f"`base` must be 0 to {len(SHA256) - 1}, got {number}")
    path = _path(_FOLDER, number)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"{path}, a base model that ships with deltad, cannot be read "
            f"({error.strerror or error}): install deltad again"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[number]:
        raise RecipeError(
            f"{path}, a base model that ships with deltad, is damaged: its SHA-256 must be "
            f"{SHA256[number]}, got {found}; install deltad again"
        )
    weights = {name: value.float() for name, value in load(content).items()}
    return weights | {_TIED: weights["model.embed_tokens.weight"]}


def make_bases(folder: Path) -> list[str]:
    """Pre-train all base models into a folder; the checksums of their files."""
    from safetensors.torch import save

    from .arithmetic import pretrained
    from .tiny import TinyRecipe

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    sums = []
    for number in range(len(SHA256)):
        weights = pretrained(TinyRecipe(pretrain_seed=number), lambda text, fraction: None)
        weights.pop(_TIED)
        content = save({name: value.bfloat16() for name, value in weights.items()})
        _path(folder, number).write_bytes(content)
        sums.append(hashlib.sha256(content).hexdigest())
        same = "as shipped" if sums[-1] == SHA256[number] else "other than the one shipped"
        print(f"{_path(folder, number)}: {sums[-1]}, {same}", flush=True)  # noqa: T201
    return sums


def _path(folder: Path, number: int) -> Path:
    """File of a base model."""
    return folder / f"tiny-{number}.safetensors"


if __name__ == "__main__":
    make_bases(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("bases"))
