import torch

# One thread each: pytest-xdist already gives every core a worker.
torch.set_num_threads(1)
