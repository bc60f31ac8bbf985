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
# # The ladder: where is the sign lost?
#
# A trust-region criterion looks at *one* token: would its gradient carry the policy further
# from the behaviour policy? The update that follows moves the token by everything else too.
# The ladder asks at which point the answer stops being true:
#
# 1. the token's **own logits** (the closed form $\hat A\,\dot D$, with the exact tail),
# 2. its **own gradient**, through parameters that it shares with every other token,
# 3. its **sequence's** gradient,
# 4. the **batch's** gradient: a step of plain SGD,
# 5. the **optimizer's** actual step, to first order,
# 6. the step itself, at a tenth, as it was made, and three times as long.
#
# On each rung: the share of tokens whose sign of $\Delta D$ the criterion foretells, beside
# the better constant guess *on that rung*.

# %%
# %matplotlib inline
from deltad.analysis import Question, ladder_table
from deltad.dumps import Dump

# %% [markdown]
# ## A tiny model, 61 seeds
#
# Recorded by `deltad record tiny data_dumps/tiny --ladder`. Every token outside the region
# but one has all rungs.

# %%
tiny = ladder_table(Dump.open("../data_dumps/tiny"))
tiny.figure()

# %%
tiny

# %% [markdown]
# **What is seen.** The prediction is good at what a token does to itself: it has 92 % of the signs
# right under the token's own gradient, and 91 % where the ratio is nearly always wrong (b). The
# sequence's other tokens cost a few points. Then the batch's other sequences push, and both
# criteria fall to a guess. From there on nothing happens any more: AdamW's step, a tenth of
# it, the whole of it and even three times as much agree (c, d). The sign is lost to
# *interference between sequences*: not to the tail, nor to curvature.
#
# ## The same under a mask
#
# The upper rungs follow one update. In the arm that applied the prediction's own mask, the
# tokens that it dropped no longer push.

# %%
own_arm = Question(protocol="shared:predictive-kl-aggregated")
ladder_table(Dump.open("../data_dumps/tiny"), own_arm).figure()

# %% [markdown]
# ## Does a better tail help?
#
# The exact tail costs a trainer nothing, for it knows all of $\pi$. On the lowest rung it is
# right by construction; the question is what is left of that further up. With 20 of 72 ids
# recorded there is hardly a tail here, so there is little to win.

# %%
tails = ["predictive-kl-exact", "predictive-kl-uniform"]
exact = ladder_table(Dump.open("../data_dumps/tiny"), criteria=tails)
exact.to_frame().query("set == 'outside'").pivot(
    index="rung", columns="criterion", values="share"
).loc[[rung.name for rung in exact.rungs]].round(3)

# %% [markdown]
# ## A real language model
#
# `data_dumps/smollm2-ladder`: SmolLM2-135M-Instruct, the unmasked arm, with the own and the
# sequence's gradient of sixteen tokens a step, disagreement tokens first. A sampled token
# counts for those of its kind that were not. Few seeds: look at the intervals.

# %%
smollm2 = ladder_table(Dump.open("../data_dumps/smollm2-ladder"))
smollm2.figure()

# %%
smollm2
