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
# # A dump in five minutes
#
# A dump holds, for every response token of real optimizer steps, the log-probs of the policy that
# sampled it and of the policy before and after the step. From these alone follows what a
# trust-region mask drops, and whether it was right to.

# %%
# %matplotlib inline
import pandas as pd

from deltad import analysis
from deltad.dumps import Dump

# %% [markdown]
# ## Open and describe
#
# `data_dumps/tiny-whole` was recorded by `deltad record tiny`: three seeds of a very small model
# that learned chained sums, with all tokens stored. Its *arms* are updates made from one and the
# same state: unmasked (`none`), masked by a criterion, and a step of length zero.

# %%
dump = Dump.open("../data_dumps/tiny-whole")
pd.Series({"arms": dump.arms, "seeds": dump.seeds("none"), "K": dump.top_k, "n": dump.vocab_size})

# %%
metadata = dump.metadata("ratio")
pd.Series({**metadata.update, **metadata.readout}, name="arm ratio")

# %% [markdown]
# The files are plain Parquet, one row a token; any reader of Parquet opens them.

# %%
part = "../data_dumps/tiny-whole/arm=none/seed=0/part-0-0.parquet"
pd.read_parquet(part).drop(columns=["topk_behavior_logprobs", "topk_post_logprobs"]).head(4).T

# %% [markdown]
# ## The table
#
# A token is *outside* where $D(\mu\|\pi) > \delta$. Of the tokens outside that exactly one of two
# criteria masks, each keeps some; a kept token whose divergence rose all the same was unsafe to
# keep. Beside each rate stand its counts and what a constant guess would get right.

# %%
table = analysis.rate_table(dump)
print(table)

# %% [markdown]
# The same as a figure, and seed by seed as a data frame.

# %%
table.figure()

# %%
table.to_frame()

# %% [markdown]
# ## The tokens themselves
#
# One row a token with D before and after, ΔD, the ratio r, the direction Ḋ, and every criterion's
# decision: here the tokens that the two criteria disagree about.

# %%
tokens = analysis.TokenTable(dump, disagreement=True).to_frame()
keys = ["seed", "step", "sequence", "position", "token", "advantage"]
values = ["d_pre", "delta_d", "ratio", "d_dot", "keep_ratio", "keep_predictive_kl_aggregated"]
tokens[keys + values].head(8)

# %% [markdown]
# Most have an r not far above 1: the sampled token's own probability hardly moved, and D comes
# from the other ids of the top-K.

# %%
tokens["ratio"].describe()

# %% [markdown]
# ## All criteria side by side
#
# What each masks, how often it foretells the sign of ΔD, and who agrees with whom; the neighbours'
# masks and weights are among them. `deltad compare RUN` prints the table, `-o compare.png` draws.

# %%
comparison = analysis.compare(dump)
comparison.figure()

# %%
comparison.to_frame()[["criterion", "masked", "weight_outside", "outside_accuracy", "holm_p"]]

# %% [markdown]
# Three seeds of a tiny model decide nothing in favour of a criterion: no interval lies above the
# constant guess.
#
# ## Where is a criterion right?
#
# The same numbers for parts of the tokens: here by whether a sibling response stood in the same
# state, and by the ratio's distance from 1. `deltad compare RUN --by state,ratio` prints them.

# %%
conditions = analysis.condition_table(dump, by=["state", "ratio"])
print(conditions)

# %%
conditions.figure()

# %% [markdown]
# A state of its own is one that no other response of the group went through, so that no sibling
# pushes at the very same distribution.
#
# Further: *disagreement and protocols* asks whose update should judge a kept token, *Figure 4*
# reads the paper's figure on more seeds, *the ladder* finds where the sign is lost.
