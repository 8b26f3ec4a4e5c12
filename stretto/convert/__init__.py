"""Hugging Face folders become models of Stretto, and models of Stretto become Hugging Face folders.

    families.py  the models that both sides have, and where config.json says what a [model] section says
    names.py     the tables of parameter names
    folder.py    reads and writes folders: configuration, weights, tokenizer

Nothing is imported here: config.py imports families.py, which needs the standard library alone.
"""
