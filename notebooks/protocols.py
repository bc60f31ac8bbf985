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
# # Disagreement and protocols
#
# Two criteria disagree about a token, one keeps it, and its divergence rose: the keep was unsafe.
# But rose *under which update*? A step made with one mask moves a token otherwise than a step made
# with another, or with none. The paper says "one actual update". A dump with arms holds several
# that were made from one and the same state, so the question can be asked under each.

# %%
# %matplotlib inline
import pandas as pd

from deltad import analysis
from deltad.dumps import Dump

tiny, real = Dump.open("../data_dumps/tiny"), Dump.open("../data_dumps/smollm2")

# %% [markdown]
# ## One question under every protocol
#
# `shared:none` judges both criteria by the unmasked update, `shared:ratio` by the one that the
# ratio masked, `own` each criterion by the update that its own mask made.
# `deltad table RUN --over protocol` prints this.

# %%
protocols = analysis.sweep(tiny, over="protocol")
print(protocols)

# %%
protocols.figure()

# %% [markdown]
# The *base rate* moves more than any difference between criteria: P(ΔD > 0) among tokens outside
# is 0.500 under the unmasked update and 0.315 to 0.325 where a mask was applied. Unsafe-keep rates
# go down with it, for both criteria. Rates of different protocols are different quantities:
# compare within a row.
#
# ## Why the base rate falls
#
# One would think: because masked tokens no longer push themselves out. So take the tokens outside
# that the ratio *keeps* apart from those that it masks. The kept ones are in the loss of `none`
# and of `ratio` alike, with the same gradient of their own.

# %%
arms = ("none", "ratio", "predictive-kl-aggregated")
asked = {arm: analysis.Question(protocol=f"shared:{arm}") for arm in arms}
frames = {arm: analysis.TokenTable(tiny, asked[arm], outside=True).to_frame() for arm in arms}
rose = {arm: frame.delta_d.gt(0).groupby(frame.keep_ratio).mean() for arm, frame in frames.items()}
pd.DataFrame(rose).rename_axis(index="kept by the ratio", columns="P(ΔD > 0) under").round(3)

# %%
moved = {arm: frame.delta_d.groupby(frame.keep_ratio).mean() for arm, frame in frames.items()}
pd.DataFrame(moved).rename_axis(index="kept by the ratio", columns="mean ΔD, nats").round(3)

# %% [markdown]
# It falls for both alike: from 0.538 to 0.355 for the masked ones, and from 0.445 to 0.283 for
# the *kept* ones, whose own gradient is the same in both. So a mask does not act on the tokens that
# it drops alone. Two things can reach the others: the dropped gradients no longer move their
# neighbours, and AdamW scales what is left up to the same length of step. This table cannot tell
# them apart; *the ladder* measures a token's own gradient, its batch's and the optimizer's step one
# by one.
#
# Within each column the ratio does tell the two apart, by seven to nine points under every update:
# the tokens that it masks rise more often.
#
# ## What each protocol favours
#
# - `shared:none`: the kept token's own push is there, but so are those of all masked tokens.
#   A criterion is judged in a step that nobody who uses it would make.
# - `own`: the step that would be made. Each criterion gets the update that its own mask calms, and
#   a kept token was in the loss; the two rates come from two different updates.
# - `shared:<criterion>`: both by one masked update. A token that only the *other* criterion keeps
#   was not in its loss, so its own push is missing. Under `shared:ratio` the prediction's keeps are
#   unsafe in 0.471 instead of the 0.392 of `own`: not the keeps changed, but the update.
#
# ## Does it depend on the threshold?
#
# From D > 0.05 on, this dump can answer any δ; below, it is refused, and the reason is said.

# %%
thresholds = analysis.sweep(tiny, over="threshold")
thresholds.figure()

# %%
thresholds.refused["0.02"]

# %% [markdown]
# No: the interval of the difference contains 0 at every δ, and both rates follow the base rate up
# as δ grows (what is far outside already tends to go on).
#
# ## Or on K?
#
# The same dump as an engine that returns fewer ids would have left it: tails recomputed, D smaller
# on fewer ids.

# %%
analysis.sweep(tiny, over="top-k").figure()

# %% [markdown]
# With K' = 8 of a vocabulary of 72 nearly twice as many tokens are in disagreement as with 20: a
# heavy tail is where the aggregated prediction departs from the ratio. And it is the worse of the
# two there: from K' = 2 to 12 its unsafe-keep rate is 12 to 20 points above that of the ratio.
#
# ## Is there anything in the prediction?
#
# A rate looks at a sign alone. The *size* of the predicted change, Â · r · Ḋ, can be held against
# ΔD too. On the real model, whose base rate of 0.86 drowns every sign:

# %%
calibration = analysis.calibrate(real)
calibration.figure()

# %% [markdown]
# The prediction orders tokens: Spearman +0.21 with ΔD, against +0.16 for the ratio, and mean ΔD
# grows from 0.12 to 0.30 nats from the first to the last eighth. But it stays above 0 throughout:
# the step lifts nearly all tokens, and the place where the prediction turns positive (the
# triangles) is not where ΔD does. Both are true: the direction knows something, and the mask made
# from its sign is right on 0.60 of the tokens, where a constant guess is on 0.86.

# %%
columns = ["direction", "spearman_seed_mean", "spearman_seed_mean_low", "spearman_seed_mean_high"]
calibration.to_frame()[columns].drop_duplicates().round(3)

# %% [markdown]
# ## What to report
#
# The protocol, always; the base rate and the constant guess beside every rate; numerators and
# denominators; intervals over seeds. All seeds of a dump share one base model, which no interval
# here covers.
