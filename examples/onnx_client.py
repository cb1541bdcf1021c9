"""Classify a photo with a model from `didicm export`: python onnx_client.py model.onnx photo.jpg.

Needs only numpy, Pillow and onnxruntime.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1])
about = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
how, size = about["transform"], about["transform"]["size"]
image = ImageOps.exif_transpose(Image.open(sys.argv[2])).convert({1: "L", 3: "RGB"}[how["channels"]])
scaled = [int(int(size / how["crop_pct"]) * side / min(image.size)) for side in image.size]
image = image.resize(scaled, Image.Resampling[how["interpolation"].upper()])
left, top = (round((side - size) / 2) for side in scaled)
pixels = np.asarray(image.crop((left, top, left + size, top + size))).reshape(1, size, size, -1)
probs = session.run(["probs"], {"image": pixels})[0][0]
print(*(f"{about['class_names'][k]}: {probs[k]:.6f}" for k in probs.argsort()[::-1][:5]), sep="\n")
