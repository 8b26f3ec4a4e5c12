"""Image classification by stretto.hf.Trainer: an .npz with images [N, H, W, 3] and labels [N], or made ones.

python examples/finetune_vit.py [--model FOLDER] [--data FILE.npz] [--out FOLDER]
"""

import numpy as np
import torch
from small import load_model, parse
from transformers import AutoModelForImageClassification, TrainingArguments, ViTConfig

from stretto.hf import Trainer


def make_images(count: int, size: int = 32) -> dict[str, np.ndarray]:
    """Three classes: the colour of the square."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 80, (count, size, size, 3)), random.integers(0, 3, count)
    for image, label, (x, y) in zip(images, labels, random.integers(0, size // 2, (count, 2)), strict=True):
        image[x : x + size // 2, y : y + size // 2, label] += 150
    return {"images": images, "labels": labels}


args = parse(__doc__, "data", "out")
data = np.load(args.data, allow_pickle=False) if args.data else make_images(600)
images, labels = data["images"], data["labels"]
pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
samples = [{"pixel_values": pixel, "labels": int(label)} for pixel, label in zip(pixels, labels, strict=True)]
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
config = ViTConfig(image_size=pixels.shape[-1], patch_size=8, num_labels=int(labels.max()) + 1, **sizes)
options = {"num_train_epochs": 4, "per_device_train_batch_size": 32, "learning_rate": 5e-5 if args.model else 2e-3}
options |= {name: torch.cuda.is_available() for name in ("bf16", "dataloader_pin_memory")}
options |= {"logging_steps": 10, "save_strategy": "no", "report_to": "none"}
model = load_model(AutoModelForImageClassification, args.model, config)
trainer = Trainer(model, TrainingArguments(args.out or "runs/finetuned-vit", **options), train_dataset=samples[100:])
before = (trainer.predict(samples[:100]).predictions.argmax(-1) == labels[:100]).mean()
trainer.train()
trainer.save_model()
after = (trainer.predict(samples[:100]).predictions.argmax(-1) == labels[:100]).mean()
print(f"accuracy on images it has not seen: {before:.3f} before, {after:.3f} after")
