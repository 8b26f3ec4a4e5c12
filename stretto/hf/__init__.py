"""Hugging Face models, made faster where they are.

`accelerate(model)` gives back the same object, with the same parameters and names, over the kernels of ops;
`restore(model)` undoes it; `report(model)` says what was done. `Step` is a loop's whole update, launched as one;
`Trainer` takes the place of transformers' own.

    roles.py      finds what a module does by running it: never by the name of its class
    layers.py     the modules that take the place of those that were found
    journal.py    how a module is exchanged, and how that is undone
    trial.py      what every exchange has to pass: the same results, in numbers that cannot hide a difference
    draw.py       the batches that models are tried on
    padding.py    which batches a model may be given without their padding
    exchanges.py  all exchanges of a model, each tried before it stays
    packing.py    padded batches and packed documents: layers run on the real tokens alone
    attention.py  attention inside the sequences of such a batch, through transformers' own interface
    loss.py       logits that are not computed unless somebody looks at them, and the loss without them
    layer_drop.py, standardize.py  the techniques that change the mathematics, in such a model
    swap.py       accelerate, restore, report, set_step
    batching.py   batches of few shapes, for a loop of one's own
    step.py       whole updates as CUDA graphs, for a loop of one's own
    trainer.py    transformers' Trainer with all that
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.hf.step import Step
    from stretto.hf.swap import accelerate, report, restore, set_step
    from stretto.hf.trainer import Seq2SeqTrainer, Trainer

_MODULES = {
    "accelerate": "swap", "restore": "swap", "report": "swap", "Step": "step", "Trainer": "trainer",
    "Seq2SeqTrainer": "trainer", "set_step": "swap",
}  # fmt: skip
__all__ = ["Seq2SeqTrainer", "Step", "Trainer", "accelerate", "report", "restore", "set_step"]


def __getattr__(name: str) -> Any:
    """What needs transformers imports it when it is asked for: training starts from a folder without it."""
    if name in _MODULES:
        return getattr(import_module(f"stretto.hf.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
