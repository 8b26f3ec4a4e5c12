"""Translation by stretto.hf.Seq2SeqTrainer: two files with as many lines (plain or gzip), or made sentences.

python examples/finetune_marian.py [--model FOLDER] [--source train.en.gz --target train.de.gz] [--out FOLDER]
"""

import torch
from sacrebleu import corpus_bleu
from small import load_model, load_tokenizer, make_sentences, parse, read_lines
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, MarianConfig, Seq2SeqTrainingArguments

from stretto.hf import Seq2SeqTrainer

args = parse(__doc__, "source", "target", "out")
source = read_lines(args.source) if args.source else make_sentences(1000)
target = read_lines(args.target) if args.target else [text.upper().replace("THE ", "LE ") for text in source]
tokenizer = load_tokenizer(args.model, source + target)
rows = tokenizer(source, text_target=target, truncation=True, max_length=128)
samples = [{"input_ids": ids, "labels": row} for ids, row in zip(rows["input_ids"], rows["labels"], strict=True)]
sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 128}
specials = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": None}
config = MarianConfig(vocab_size=len(tokenizer), scale_embedding=True, init_std=0.1, **sizes, **heads, **specials)
model = load_model(AutoModelForSeq2SeqLM, args.model, config)
options = {"num_train_epochs": 5, "per_device_train_batch_size": 32, "learning_rate": 5e-5 if args.model else 3e-3}
options |= {name: torch.cuda.is_available() for name in ("bf16", "dataloader_pin_memory")}
options |= {"logging_steps": 20, "save_strategy": "no", "report_to": "none"}
options |= {"label_smoothing_factor": 0.1, "predict_with_generate": True}
training = Seq2SeqTrainingArguments(args.out or "runs/finetuned-marian", **options)
collator = DataCollatorForSeq2Seq(tokenizer, model)
trainer = Seq2SeqTrainer(model, training, collator, samples[100:], processing_class=tokenizer)
trainer.train()
trainer.save_model()
found = trainer.predict(samples[:100], max_length=128).predictions.clip(min=0)
score = corpus_bleu(tokenizer.batch_decode(found, skip_special_tokens=True), [target[:100]]).score
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last; BLEU of sentences it has not seen: {score:.1f}")
