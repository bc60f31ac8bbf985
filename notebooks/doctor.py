# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The doctor on a broken run
#
# Engine and trainer disagree for a handful of well-known reasons: a temperature applied on one
# side, a chat template with a token too many, a −9999 that means "missing". A mask built on such
# numbers masks the wrong tokens, and every rate in a table is about the fault. Here a recorded
# run is broken in two ways, and the doctor looks at it.

# %%
import sys
from pathlib import Path
from tempfile import mkdtemp

from deltad.analysis import rate_table
from deltad.analysis.doctor import examine
from deltad.dumps import Dump

sys.path.append("..")  # the folder that holds `benchmarks`
from benchmarks.doctor import write_injected

healthy = Dump.open("../data_dumps/smollm2-whole")
examine(healthy)

# %% [markdown]
# Nothing wrong, although the policies are far apart: five optimizer steps lie between them. The
# doctor never asks whether μ and π differ, but whether they differ in a way that updates do not
# produce.
#
# ## One fault: a temperature on one side
#
# The trainer divides its logits by 0.8 and the engine does not.

# %%
folder = Path(mkdtemp())
tempered = write_injected(healthy, folder / "tempered", "temperature-policy", 0.8)
diagnosis = examine(tempered)
diagnosis

# %% [markdown]
# In every row $\log\pi_j = \log\mu_j / \tau + c$; the slope is read where the rows drifted least,
# and τ̂ comes out with an interval. How much harm would it have done?

# %%
for run in (healthy, Dump.open(tempered)):
    table = rate_table(run)
    print(run.path.name, "outside:", table.outside.tokens)

# %% [markdown]
# ## A second fault on top: fills
#
# A server answers −9999 where it has no log-prob, in one row of twenty.

# %%
twice = write_injected(tempered, folder / "twice", "minus-9999-row", 0.05)
diagnosis = examine(twice)
diagnosis

# %% [markdown]
# Both are found: cells that hold a fill are left out of what follows, so that −9999 does not look
# like a temperature, another model or anything else.

# %%
diagnosis.to_frame()[["cause", "confidence", "tokens", "estimate"]]

# %% [markdown]
# ## A fault that looks like another
#
# If the policy's rows are one token late, the two policies look like two models: D is nine
# nats. What tells it apart is the neighbor: π at t follows μ at t − 1.

# %%
late = write_injected(healthy, folder / "late", "shift", 1.0)
examine(late)

# %% [markdown]
# From the command line the same is `deltad doctor RUN`, with exit status 3 where there are
# findings and `--format json` for scripts; `docs/doctor.md` describes every cause.
