"""Record what each optimizer step of verl's PPO does to the policy, and train with a mask.

    python examples/verl_ppo.py [RUN]

A quickstart on a CPU: verl's own training worker and FSDP2 engine with a tiny model. In a real
training nothing but the environment variables and one override is added to verl's command; see
docs/verl.md.
"""

import os
import sys
import tempfile

import verl_cpu

run = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()

# deltad: where to record, and the plugin. verl finds a deltad that pip installed by itself.
os.environ["DELTAD_VERL_RUN"] = run
os.environ["VERL_USE_EXTERNAL_MODULES"] = "deltad.probes.verl"

verl_cpu.use_cpu()
model = verl_cpu.tiny_model(tempfile.mkdtemp())
# deltad: a mask as verl's policy loss, actor_rollout_ref.actor.policy_loss.loss_mode.
worker = verl_cpu.worker(model, loss_mode="predictive_kl", lr=1e-2)
batch = verl_cpu.rollout(model)
for _ in range(2):  # twice the same responses, which are stale the second time
    worker.train_mini_batch(batch.copy())

# deltad: what was recorded, checked and counted.
from deltad.analysis import Question, rate_table
from deltad.dumps import Dump, check_dump

check_dump(run)
print(rate_table(Dump.open(run), Question(threshold=0.05)))
