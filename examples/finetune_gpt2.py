"""A language model of the lines of a text file, or of made sentences, by stretto.hf.Trainer.

python examples/finetune_gpt2.py [--model FOLDER] [--data FILE] [--out FOLDER]
"""

import torch
from small import load_model, load_tokenizer, make_sentences, parse, read_lines
from transformers import AutoModelForCausalLM, GPT2Config, TrainingArguments

from stretto.hf import DataCollator, Trainer

args = parse(__doc__, "data", "out")
texts = read_lines(args.data) if args.data else make_sentences(600)
tokenizer = load_tokenizer(args.model, texts)
rows = tokenizer(texts, truncation=True, max_length=512)["input_ids"]
samples = [{"input_ids": row, "labels": row} for row in rows if len(row) > 1]
ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
config = GPT2Config(vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=512, **ends)
cut = len(samples) * 9 // 10
options = {"num_train_epochs": 3, "per_device_train_batch_size": 16, "learning_rate": 5e-5 if args.model else 5e-3}
options |= {name: torch.cuda.is_available() for name in ("bf16", "dataloader_pin_memory")}
options |= {"logging_steps": 10, "save_strategy": "no", "report_to": "none"}
trainer = Trainer(
    load_model(AutoModelForCausalLM, args.model, config),
    TrainingArguments(args.out or "runs/finetuned-gpt2", **options),
    DataCollator(tokenizer.eos_token_id),
    train_dataset=samples[:cut],
    eval_dataset=samples[cut:],
    processing_class=tokenizer,
)
before = trainer.evaluate()["eval_loss"]
trainer.train()
trainer.save_model()
print(f"loss of sentences it has not seen: {before:.3f} before, {trainer.evaluate()['eval_loss']:.3f} after")
