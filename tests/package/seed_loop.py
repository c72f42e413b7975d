"""What examples/spawn and examples/launch do, in Python's torch.distributed."""

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
# GCC evaluates the arguments of Sequential from the last to the first.
last = torch.nn.Linear(50, 10)
net = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), last)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.01)

inputs = torch.sin(torch.arange(102400, dtype=torch.float)).reshape(10240, 10)
labels = inputs.argmax(1)
dataset = TensorDataset(inputs, labels)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=256, sampler=sampler)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    save_file(net.state_dict(), "model.safetensors")
    print(f"final loss {loss.item():.8g}", flush=True)
dist.destroy_process_group()
