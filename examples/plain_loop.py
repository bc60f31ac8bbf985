"""A plain PyTorch loop with every token's policy recorded before and after each step.

python examples/plain_loop.py RUN
deltad table RUN
"""

import sys

import torch
import toy

from deltad.dumps import Metadata
from deltad.probes import Recorder, ResponseTokens, UpdateProbe

model = toy.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
ids, behavior = toy.rollout(model)

about = Metadata(top_k=toy.TOP_K, vocab_size=toy.VOCAB, update={"mask": "none"})
with (
    Recorder(sys.argv[1], seed=0, metadata_for=lambda arm: about) as recorder,
    UpdateProbe(model, optimizer, recorder) as probe,
):
    for _ in range(4):
        probe.expect(ResponseTokens(**behavior))
        loss = toy.loss(model(input_ids=ids).logits, ids, behavior)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
