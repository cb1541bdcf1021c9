"""Train on 20 images per class: a pretrained backbone, kept as it is, and a small diffusion head.

python examples/fine_tune.py FOLDER TEST [WEIGHTS [EPOCHS]]

FOLDER has one subfolder per class, or train/ and val/; TEST has images for the final measurement. WEIGHTS is a
file with ImageNet weights of the backbone; without it timm fetches them from the hub.
"""

import sys

import didicm
from didicm.settings import load_recipe

folder, test, weights, epochs = [*sys.argv[1:], None, None][:4]
config = load_recipe(
    "finetune",
    data=folder,
    out="runs/fine-tuned",
    fraction=20,  # a whole number: images per class
    epochs=int(epochs or 20),
    feature_views=2,  # the backbone sees each image twice, then only the head is trained
    model_args={"backbone": "tf_efficientnet_lite0", "frozen": True, "weights": weights},
    image={"size": 64},  # small, to be quick
    optimizer={"lr": 1e-3},  # a head alone can take larger steps
    run={"workers": 0, "validate_epochs": 5},
)
run = didicm.train(config)
result = didicm.evaluate(run, test)  # not the validation images: they chose the weights in best/
print(
    f"on {test}: accuracy {result.metrics['cls/Acc']:.1%}, negative log-likelihood {result.metrics['cls/NLL']:.3f}"
)
