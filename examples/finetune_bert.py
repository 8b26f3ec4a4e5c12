"""Text classification in a loop of one's own, whose updates are CUDA graphs: lines of label<tab>text, or made ones.

python examples/finetune_bert.py [--model FOLDER] [--data FILE]
"""

import torch
from small import GOOD, load_model, load_tokenizer, make_sentences, parse, read_lines
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig

import stretto
from stretto.hf import DataCollator, Step, TokenBudgetSampler
from stretto.optim import FlatAdamW

args = parse(__doc__, "data")
made = [f"{text.split()[-1] in GOOD}\t{text}" for text in make_sentences(800)]
labels, texts = zip(*(line.split("\t", 1) for line in (read_lines(args.data) if args.data else made)), strict=True)
names, tokenizer = sorted(set(labels)), load_tokenizer(args.model, list(texts))
ids = tokenizer(list(texts), truncation=True, max_length=512)["input_ids"]
samples = [{"input_ids": row, "labels": names.index(label)} for row, label in zip(ids, labels, strict=True)]
collator, held = DataCollator(tokenizer.pad_token_id), samples[::10]
learned = [sample for i, sample in enumerate(samples) if i % 10]
sampler = TokenBudgetSampler([len(sample["input_ids"]) for sample in learned], max_tokens=1024)  # batches of few shapes
loader = DataLoader(learned, batch_sampler=sampler, collate_fn=collator)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
config = BertConfig(vocab_size=len(tokenizer), num_labels=len(names), hidden_dropout_prob=0.0, **sizes)
model = load_model(AutoModelForSequenceClassification, args.model, config).train()
model = stretto.accelerate(model.to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16))
optimizer = FlatAdamW(model.parameters(), lr=3e-5 if args.model else 7e-4, weights="split")  # the upper halves of fp32
step, right = Step(model, optimizer, clip=1.0), 0
for epoch in range(6):
    sampler.set_epoch(epoch)
    print(f"epoch {epoch + 1}: loss {torch.stack([step(batch) for batch in loader]).mean():.3f}")
model.eval()
for batch in DataLoader(held, 64, collate_fn=collator):
    logits = model(*(batch[name].to(model.device) for name in ("input_ids", "attention_mask"))).logits
    right += int((logits.argmax(-1).cpu() == batch["labels"]).sum())
print(f"accuracy on texts it has not seen: {right / len(held):.3f}")
