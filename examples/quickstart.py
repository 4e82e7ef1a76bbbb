"""Ten steps of a mixture of experts: `python examples/quickstart.py`, or through torchrun on any number of ranks."""

from pydoc_data.topics import topics  # Python's own help, to learn from

import torch

import elixir_moe as em
from elixir_tools.models.gpt import GPT, GPTConfig, lm_loss

mesh = em.init_mesh()  # the ranks that torchrun started, or only this process
rank, ranks, device = mesh.get_local_rank("dp"), mesh.size(0), mesh.device_type
expert_mesh = em.expert_mesh(mesh, ep=ranks)  # the same ranks, sharing out the experts of a layer
torch.manual_seed(0)
model = GPT(GPTConfig(experts=(0, 4, 0, 4), ep=(1, ranks, 1, ranks)), mesh)
rules = {
    "*.experts.*": em.Pattern(expert_mesh, replicate=("edp",), shard={"ep": 0}),
    "*": em.Pattern(mesh, replicate=("dp",)),
}
em.annotate(model, rules)  # the first rule that matches a parameter says what it is
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model, optimizer = em.wrap(model, optimizer, plan=em.Plan.offload())

text = torch.tensor(list("".join(topics.values()).encode()))
for step in range(10):
    starts = torch.randint(len(text) - 128, (8,), generator=torch.Generator().manual_seed(step))
    batch = torch.stack([text[start : start + 129] for start in starts])  # the same on all ranks
    loss = lm_loss(model, batch.chunk(ranks)[rank].to(device))
    loss.backward()
    norm = optimizer.clip_grad_norm_(1.0)  # the exact norm over all ranks
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.2f}")
