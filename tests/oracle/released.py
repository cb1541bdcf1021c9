"""The authors' released network, rebuilt from its description, and its checkpoints: the oracle of the import."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class ReleasedBlock(nn.Module):
    """A block as the released code names and orders its parts."""

    def __init__(self, inputs, width, expansion, stride):
        super().__init__()
        outputs = width * expansion
        if expansion == 1:
            sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        else:
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        for i, (a, b, k, s) in enumerate(sizes, 1):
            setattr(self, f"conv{i}", nn.Conv2d(a, b, k, s, k // 2, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(b))
        self.skip_connection = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip_connection = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(128, outputs))
        self.out_layers = nn.Sequential(nn.GroupNorm(32, outputs), nn.SiLU())
        self.count = len(sizes)

    def forward(self, x, emb):
        out = x
        for i in range(1, self.count + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
            if i < self.count:
                out = F.relu(out)
        return F.relu(self.out_layers(out + self.emb_layers(emb)[..., None, None]) + self.skip_connection(x))


class ReleasedNet(nn.Module):
    """The released network, rebuilt from its description: the oracle of the conversion."""

    def __init__(self, depths, expansion, num_classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        self.ff_emb = nn.Module()
        self.ff_emb.mlp = nn.Sequential(nn.Linear(256, 128), nn.SiLU(), nn.Linear(128, 128))
        self.label_embedder = nn.Embedding(num_classes, 128)
        inputs = 64
        for stage, depth in enumerate(depths):
            blocks = nn.ModuleList()
            for i in range(depth):
                blocks.append(ReleasedBlock(inputs, 64 * 2**stage, expansion, 2 if stage and not i else 1))
                inputs = 64 * 2**stage * expansion
            setattr(self, f"layer{stage + 1}", blocks)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x, label, total):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        wave = 10_000 ** (-torch.arange(128) / 128)
        angle = total[:, None] * wave
        emb = self.ff_emb.mlp(torch.cat([angle.cos(), angle.sin()], 1)) + self.label_embedder(label)
        for stage in range(1, 5):
            for block in getattr(self, f"layer{stage}"):
                x = block(x, emb)
        out = self.fc(x.mean((2, 3)))
        return out * (1 - F.one_hot(label, out.shape[1]))


def write_released(path, net, ema=None, prefix="", args=None):
    state = {prefix + name: x for name, x in net.state_dict().items()}
    file = {"epoch": 3, "arch": "didirn18", "state_dict": state, "optimizer": {}, "version": 2, "metric": 71.5}
    if ema is not None:
        file["state_dict_ema"] = {prefix + name: x for name, x in ema.state_dict().items()}
    file["args"] = args or argparse.Namespace(input_size=[3, 112, 112], crop_pct=None, lr=3.5e-3)
    torch.save(file, path)
    return path
