"""Plot the posterior of an image from the first step of the diffusion to the last.

python examples/plot_posterior.py RUN IMAGE PICTURE
"""

import sys

import matplotlib

matplotlib.use("Agg")  # a file, no window
from matplotlib import pyplot as plt
from PIL import Image

import didicm

run, image, picture = sys.argv[1:]
predictor = didicm.Predictor.load(run)
prediction = predictor(image, trajectory=True)
times = [time for time, _ in prediction.trajectory]

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.6), width_ratios=(1, 2.4), layout="constrained")
left.imshow(Image.open(image), cmap="gray")
left.axis("off")
for name, _ in prediction.classes[:4]:  # the four most probable in the end
    k = predictor.class_names.index(name)
    right.plot(times, [probs[k] for _, probs in prediction.trajectory], marker="o", markersize=3, label=name)
right.set(xlim=(1, 0), ylim=(0, 1), xlabel="diffusion time", ylabel="probability")
right.legend(frameon=False)
right.spines[["top", "right"]].set_visible(False)
figure.savefig(picture, dpi=120)
print(f"{picture}: {prediction.classes[0][0]} {prediction.classes[0][1]:.0%} after {len(times) - 1} steps")
