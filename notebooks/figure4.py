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
# # Figure 4: what became of the tokens that a mask kept?
#
# A trust-region mask drops a token's gradient where the token lies outside the region
# ($D(\mu\|\pi) > \delta$) and its gradient would carry it further out. Two criteria guess the
# second part:
#
# - **ratio** (PPO, DPPO): $\hat A\,(r - 1) > 0$,
# - **predictive**: $\hat A\,\dot D > 0$, with $\dot D$ the divergence's own derivative along
#   the token's policy gradient, in closed form from the top-K log-probs.
#
# Mostly they agree. The *disagreement set* holds the tokens outside the region that exactly one
# of them masks; each criterion keeps one part of it. The question of Figure 4: of the tokens
# that a criterion **kept**, how many moved outward all the same (unsafe), how many inward
# (contracting)? That needs the divergence before and after a real optimizer step, and a dump
# holds just that.

# %%
# %matplotlib inline
from deltad.analysis import Question, figure4, protocol_table, rate_table
from deltad.dumps import Dump

# %% [markdown]
# ## 61 seeds of a tiny model
#
# `data_dumps/tiny` was recorded by `deltad record tiny`: a Qwen3 of an eighth of a million
# parameters that learned chained sums. In each of 61 seeds one rollout batch is split into
# twelve minibatches; at every minibatch but the first, three updates branch from one and the
# same state: unmasked (`none`), masked by the ratio, masked by the prediction.

# %%
tiny = Dump.open("../data_dumps/tiny")
table = rate_table(tiny)
print(table)

# %%
figure4(table)

# %% [markdown]
# **What is seen.** (a) Most kept tokens move by a few hundredths to a few tenths of a nat, in
# both directions. (b) The intervals of the two contracting fractions overlap. (c) A line a seed:
# which criterion is lower changes from seed to seed. The dotted line is the base rate, P(ΔD > 0)
# among all disagreement tokens: a criterion that knows something keeps tokens *below* it.

# %% [markdown]
# ## Whose update?
#
# The figure above judges both criteria by one update, the unmasked one (`shared:none`). There,
# a kept token's neighbours that were *not* kept push as well. Under `own`, each criterion's
# kept tokens are judged in the arm where its own mask was applied. The paper says "one actual
# update" and not which, so every protocol is shown. Under `shared:ratio` the prediction has the
# higher rate in 36 seeds and the lower in 18 (p 0.02, not corrected for four protocols); under the
# other three the sign test finds no difference.

# %%
protocols = protocol_table(tiny)
print(protocols)

# %%
own = next(each for each in protocols.tables if each.question.protocol == "own")
figure4(own)

# %% [markdown]
# A token that the criterion kept took part in its own arm's loss, so `own` credits the
# prediction with the push that it predicted, and masks that drop more tokens lower the base
# rate for all. Rates of different protocols are different quantities: compare within a row,
# never between rows.

# %% [markdown]
# ## A real language model
#
# `data_dumps/smollm2`: SmolLM2-135M-Instruct on chained sums of reasoning-gym, twelve seeds of
# six minibatches of sixteen responses, AdamW with a warmed-up state; `deltad record smollm2`.

# %%
smollm2 = Dump.open("../data_dumps/smollm2")
real = rate_table(smollm2)
print(real)

# %%
print(protocol_table(smollm2))

# %%
figure4(real)

# %% [markdown]
# Here the base rate decides everything: nearly every token outside the region moves further
# out, whatever a criterion says of it. Sixteen responses and a learning rate that carries 15 %
# of the tokens outside within six steps make one common drift, and AdamW's memory goes on with
# it; a token's own push is lost in it. The criteria cannot be told apart, and a constant guess
# beats both.
#
# ## Why these numbers are not the paper's
#
# - **Scale.** The paper measures large batches of a large model, with about 1.4 % of tokens
#   outside; a step there moves any one token little, and neighbours' pushes average out. Here a
#   batch is a few dozen responses, and a fifth of the tokens of `tiny` lie outside.
# - **Protocol.** The paper does not say whose update it uses. Rates differ more between
#   protocols than between criteria.
# - **The base model.** All seeds of a dump start from one pre-trained model; intervals over
#   seeds do not cover the choice of that model.
# - **Noise.** 38 of 61 seeds has a two-sided sign-test p of 0.07: the paper's own headline is
#   suggestive, not settled, and a dump of ours with the same effect would often miss it.
#
# ## At a larger threshold
#
# Both dumps store the tokens with D > 0.05, so any δ from there on can be asked for.

# %%
wider = protocol_table(tiny, Question(threshold=0.5))
print(wider)
