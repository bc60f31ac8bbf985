"""A small RL training (GRPO) with a chosen mask, on the recipes' prompts and models.

`train(Training.of("tiny"), "run", masks=("ratio",), seeds=8)` trains; the command `deltad train`
does the same. Nothing here imports torch before it runs.
"""

from .files import Run as Run
from .options import DEFAULTS as DEFAULTS
from .options import MASKS as MASKS
from .options import PRECISIONS as PRECISIONS
from .options import Training as Training
from .train import DEFAULT_SEEDS as DEFAULT_SEEDS
from .train import train as train

__all__ = ["DEFAULTS", "DEFAULT_SEEDS", "MASKS", "PRECISIONS", "Run", "Training", "train"]
