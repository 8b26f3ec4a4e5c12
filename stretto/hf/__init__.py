"""Hugging Face folders: weights out of them, and whole models into them.

weights.py has the tables of names, folder.py reads and writes folders, tokenizer.py writes the tokenizer. Which models
there are, and how config.json describes them, is in stretto/families.py. batching.py makes batches for a loop of one's
own.
"""
