"""A model under fully_shard, with gradient accumulation; each rank records its own tokens.

torchrun --nproc-per-node 2 examples/fsdp2.py RUN
deltad check RUN
"""

import sys

import torch
import toy
from torch import distributed
from torch.distributed.fsdp import fully_shard

from deltad.dumps import Metadata
from deltad.probes import Recorder, ResponseTokens, UpdateProbe

distributed.init_process_group("gloo")
rank = distributed.get_rank()
model = toy.model()
ids, behavior = toy.rollout(model, rank=rank)  # sequences are numbered through all ranks
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

about = Metadata(top_k=toy.TOP_K, vocab_size=toy.VOCAB, update={"mask": "none"})
with (
    Recorder(sys.argv[1], seed=0, metadata_for=lambda arm: about) as recorder,
    UpdateProbe(model, optimizer, recorder) as probe,
):
    for _ in range(4):
        for part in (slice(0, 8), slice(8, 16)):
            model.set_requires_gradient_sync(part.stop == 16)
            micro = {name: value[part] for name, value in behavior.items()}
            probe.expect(ResponseTokens(**micro))  # on every rank, also where nothing was sampled
            loss = toy.loss(model(input_ids=ids[part]).logits, ids[part], micro)
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
distributed.destroy_process_group()
