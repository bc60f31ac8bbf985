"""An Accelerate loop with gradient accumulation and bf16 autocast.

python examples/accelerate_loop.py RUN
deltad table RUN
"""

import sys

import torch
import toy
from accelerate import Accelerator

from deltad.dumps import Metadata
from deltad.probes import Recorder, ResponseTokens, UpdateProbe

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = toy.model()
ids, behavior = toy.rollout(model, rank=accelerator.process_index)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
ids = ids.to(accelerator.device)
behavior = {name: value.to(accelerator.device) for name, value in behavior.items()}

about = Metadata(top_k=toy.TOP_K, vocab_size=toy.VOCAB, update={"mask": "none"})
with (
    Recorder(sys.argv[1], seed=0, metadata_for=lambda arm: about) as recorder,
    UpdateProbe(model, optimizer, recorder) as probe,
):
    for _ in range(4):
        for part in (slice(0, 8), slice(8, 16)):
            with accelerator.accumulate(model):
                micro = {name: value[part] for name, value in behavior.items()}
                probe.expect(ResponseTokens(**micro))
                loss = toy.loss(model(input_ids=ids[part]).logits, ids[part], micro)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
