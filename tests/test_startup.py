"""What a command or a package must not import: it starts fast, and needs no optional package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dumps.factory import make_dump

HEAVY = (
    "torch",
    "transformers",
    "pandas",
    "scipy.stats",
    "matplotlib",
    "pydantic",
    "fsspec",
    "s3fs",
)
CHAINS = {
    # Code, and modules that must be absent after it. One process runs a whole chain, so what must
    # be absent after a step must be absent after the steps before it too.
    "help": [
        ("command('--help')", 
         ("deltad.masks", "rich.console", "typer.rich_utils")),
        ("command('table', '--help')", ("deltad.analysis", "numpy", "pyarrow")),
        ("import deltad.probes.recipes as r; [each.variant(v) for each in r.RECIPES.values()"
         " for v in each.variants]", ()),
        ("command('record', '--help'); command('record', 'smollm2', '--help')", ()),
        ("command('train', '--help'); command('train', 'tiny', '--help')", ()),
        ("command('view', '--help'); command('check', '--help')", HEAVY),
    ],
    "reading": [
        ("import deltad.dumps", ("pyarrow", "array_api_compat")),
        ("read(both)", ("pyarrow.compute", "pyarrow.dataset", "numpy.ma", "numpy.f2py")),
        ("import deltad.masks; command('table', one)",
         ("rich.console", "rich.table", "scipy", "statistics")),
        ("command('table', one, '--threshold', '0.2', '--quiet', '--format', 'json')",
         ("typer._adapters",)),
        ("command('table', 'no/such/dump')", ()),
        ("command('watch', both, '--once')", ()),
        ("import deltad.probes.engines, deltad.probes.offline, deltad.commands.imports", ()),
        ("[command('table', both, '--quiet', '--format', form)"
         " for form in ('json', 'text', 'csv', 'markdown')]", ()),
        ("import deltad.analysis as a; [getattr(a, name) for name in a.__all__]", HEAVY),
    ],
}  # fmt: skip
PROCESS = """
import json, sys

def command(*arguments):
    from deltad.cli import app
    app(arguments, standalone_mode=False)

def read(run):
    from deltad.dumps import Dump, batch_tokens, check_batch
    dump = Dump.open(run)
    for arm in dump.arms:
        for seed in dump.seeds(arm):
            for batch in dump.batches(arm, seed):
                check_batch(batch, dump.metadata(arm))
                batch_tokens(batch, dump.metadata(arm)).direction("kl", "aggregated").total.sum()

one, both, steps = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
found = {}
for at, (code, _) in enumerate(steps):
    exec(code)
    absent = {name for _, names in steps[at:] for name in names}
    found[code] = sorted(absent & set(sys.modules))
print("\\n" + json.dumps({code: names for code, names in found.items() if names}))
"""


@pytest.mark.parametrize("chain", CHAINS)
def test_no_step_imports_what_it_does_not_need(tmp_path: Path, chain: str) -> None:
    one = make_dump(tmp_path / "one", rows=12, ranks=1, parts=1, seeds=(0,))
    both = make_dump(tmp_path / "both", null_vectors=0.3)
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(one), str(both), json.dumps(CHAINS[chain])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
