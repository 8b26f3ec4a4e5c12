"""Text classification in a loop of one's own, on batches of few shapes: lines of label<tab>text, or made ones.

python examples/finetune_bert.py [--model FOLDER] [--data FILE]
"""

import torch
from small import GOOD, load_model, load_tokenizer, make_sentences, parse, read_lines
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig

import stretto
from stretto.hf.batching import DataCollator, TokenBudgetSampler

args = parse(__doc__, "data")
made = [f"{text.split()[-1] in GOOD}\t{text}" for text in make_sentences(800)]
labels, texts = zip(*(line.split("\t", 1) for line in (read_lines(args.data) if args.data else made)), strict=True)
names, tokenizer = sorted(set(labels)), load_tokenizer(args.model, list(texts))
ids = tokenizer(list(texts), truncation=True, max_length=512)["input_ids"]
samples = [{"input_ids": row, "labels": names.index(label)} for row, label in zip(ids, labels, strict=True)]
sampler = TokenBudgetSampler([len(row) for row in ids], max_tokens=1024)
loader = DataLoader(samples, batch_sampler=sampler, collate_fn=DataCollator(tokenizer.pad_token_id))
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
config = BertConfig(vocab_size=len(tokenizer), num_labels=len(names), hidden_dropout_prob=0.0, **sizes)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = load_model(AutoModelForSequenceClassification, args.model, config).to(device).train()
model = stretto.accelerate(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5 if args.model else 7e-4, fused=True)
for epoch in range(6):
    sampler.set_epoch(epoch)
    total, right = torch.zeros(2, device=device)
    for batch in loader:
        out = model(**{name: value.to(device) for name, value in batch.items()})
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += out.loss.detach() / len(loader)
        right += (out.logits.argmax(-1).cpu() == batch["labels"]).sum() / len(samples)
    print(f"epoch {epoch + 1}: loss {total:.3f}, accuracy {right:.3f}")
