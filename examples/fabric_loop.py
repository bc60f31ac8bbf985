"""A Lightning Fabric loop with bf16 autocast.

python examples/fabric_loop.py RUN
deltad table RUN
"""

import sys

import torch
import toy
from lightning_fabric import Fabric

from deltad.dumps import Metadata
from deltad.probes import Recorder, ResponseTokens, UpdateProbe

fabric = Fabric(precision="bf16-mixed", devices=1)
fabric.launch()
model = toy.model()
ids, behavior = toy.rollout(model, rank=fabric.global_rank)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
ids, behavior = fabric.to_device((ids, behavior))

about = Metadata(top_k=toy.TOP_K, vocab_size=toy.VOCAB, update={"mask": "none"})
with (
    Recorder(sys.argv[1], seed=0, metadata_for=lambda arm: about) as recorder,
    UpdateProbe(model, optimizer, recorder) as probe,
):
    for _ in range(4):
        probe.expect(ResponseTokens(**behavior))
        loss = toy.loss(model(input_ids=ids).logits, ids, behavior)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
