"""Label the least certain images next: does that beat labelling at random? Measured, on small images of clothes.

python examples/label_next.py [EPOCHS]
"""

import sys

import numpy as np
import torch

import didicm
from didicm.evaluation.metrics import evaluate_probs

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 12
data = didicm.open_data("fashion-mini", channels=1)


def tensors(images):
    """Normalised images (N, 1, 28, 28) and labels (N,)."""
    return (torch.from_numpy(images.images).unsqueeze(1) / 255 - 0.5) / 0.25, torch.from_numpy(images.labels)


pool, pool_labels = (x[:600] for x in tensors(data.train))  # the labels are known, but only a few are used
test, test_labels = (x[:300] for x in tensors(data.val))


def train(chosen):
    """A small classifier of the images chosen so far."""
    torch.manual_seed(0)
    network = didicm.create_model(
        "didirn8", num_classes=10, in_chans=1, width=0.125, stem="small", parameterization="posterior"
    )
    classifier = didicm.DiffusionClassifier(network, sampler=didicm.Sampler(steps=1), label_proposal=0.5)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=5e-3, weight_decay=0.05)
    for _ in range(epochs):
        for batch in torch.from_numpy(np.random.default_rng(0).permutation(chosen)).split(25):
            loss = classifier.loss(pool[batch], torch.nn.functional.one_hot(pool_labels[batch], 10).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return classifier.eval()


for strategy in ("at random", "least certain"):
    chosen = np.random.default_rng(0).permutation(len(pool))[:100]
    for _ in range(2):
        classifier = train(chosen)
        rest = np.setdiff1d(np.arange(len(pool)), chosen)
        probs = classifier(pool[rest])
        entropy = torch.special.entr(probs).sum(1).numpy()
        order = (
            entropy.argsort()[::-1]
            if strategy == "least certain"
            else np.random.default_rng(1).permutation(len(rest))
        )
        chosen = np.concatenate([chosen, rest[order[:50]]])  # here a person would label them
    found = evaluate_probs(train(chosen)(test), test_labels)
    print(f"{strategy:>13}: {len(chosen)} labels, accuracy {found['cls/Acc']:.1%}, NLL {found['cls/NLL']:.3f}")
