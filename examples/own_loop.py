"""A diffusion classifier in a training loop of your own: it is a torch.nn.Module with a loss.

python examples/own_loop.py [EPOCHS]
"""

import sys

import torch

import didicm

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
torch.manual_seed(0)

# Any tensors will do: here small images of clothes, 20 of each class.
data = didicm.open_data("fashion-mini", channels=1)


def tensors(images, count):
    """Normalised images (N, 1, 28, 28) and labels (N,): the first of every class."""
    chosen = [i for k in range(10) for i in (images.labels == k).nonzero()[0][:count]]
    pixels = torch.from_numpy(images.images[chosen]).unsqueeze(1) / 255
    return (pixels - 0.5) / 0.25, torch.from_numpy(images.labels[chosen])


train_images, train_labels = tensors(data.train, 20)
test_images, test_labels = tensors(data.val, 20)

network = didicm.create_model(
    "didirn8", num_classes=10, in_chans=1, width=0.25, stem="small", parameterization="posterior"
)
classifier = didicm.DiffusionClassifier(network, draws_per_image=2, label_proposal=0.5)
optimizer = torch.optim.AdamW(classifier.parameters(), lr=5e-3, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=4 * epochs)

for _ in range(epochs):
    for batch in torch.randperm(len(train_labels)).split(50):
        target = torch.nn.functional.one_hot(train_labels[batch], 10).float()  # hard, smoothed or mixed labels
        loss = classifier.loss(train_images[batch], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

classifier.eval()
probs = classifier(test_images)  # probabilities, not logits: each row sums to one
accuracy = (probs.argmax(1) == test_labels).double().mean()
nll = torch.nn.functional.nll_loss(probs.log(), test_labels)
print(f"accuracy {accuracy:.1%}, negative log-likelihood {nll:.3f} on {len(test_labels)} images")
