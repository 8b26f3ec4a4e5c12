"""Hugging Face models, made faster where they are.

`accelerate(model)` gives back the same object, with the same parameters and names, over the kernels of ops;
`restore(model)` undoes it; `report(model)` says what was done. `Step` is a loop's whole update, launched as one;
`Trainer` takes the place of transformers' own. From the top to the bottom:

    trainer.py       transformers' Trainer with all that
    loop.py          batches of few shapes, and `Step`, for a loop of one's own
    update.py        whole updates as CUDA graphs, on batches that are brought to few shapes
    acceleration.py  accelerate, restore, report, set_step; all exchanges of a model in their order
    techniques.py    what techniques that change the mathematics can do in such a model
    unpad.py         padded batches and packed documents: layers run on the real tokens alone
    trial.py         changes that are tried, compared and undone
    find.py          finds what a module does by running it: never by the name of its class
    modules.py       the modules that take the place of those that were found
    defer.py         sums that wait for the norm behind them, logits that are not computed for a loss

docs/hugging-face.md lists the ways by which these files talk to each other through transformers' own code.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.hf.acceleration import accelerate, report, restore, set_step
    from stretto.hf.loop import DataCollator, Step, TokenBudgetSampler
    from stretto.hf.trainer import Seq2SeqTrainer, Trainer

_MODULES = {
    "accelerate": "acceleration", "restore": "acceleration", "report": "acceleration", "set_step": "acceleration",
    "Step": "loop", "DataCollator": "loop", "TokenBudgetSampler": "loop", "Trainer": "trainer",
    "Seq2SeqTrainer": "trainer",
}  # fmt: skip
__all__ = [
    "DataCollator", "Seq2SeqTrainer", "Step", "TokenBudgetSampler", "Trainer", "accelerate", "report", "restore",
    "set_step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What needs transformers, or the package accelerate, imports it when it is asked for."""
    if name in _MODULES:
        return getattr(import_module(f"stretto.hf.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
