"""What a technique is: one object with the hooks that it needs. Every hook of the base class does nothing, so a
technique is what it overrides, and the trainer calls all hooks without knowing whose they are.

    when                                hook
    before anything is built            check: why it cannot work, alone or with others
    the model is on the meta device     apply;  the model is Hugging Face's: attach
    the run is about to begin           build_executor: in which order passes run, if not one after the other
    weights get their first values      start_value;  the optimizer is built: build_optimizer
    a batch is made, in a thread        prepare, for training and evaluation
    around each update                  begin, end
    an update may be a CUDA graph       find_obstacles, graph_key, pattern
    a line is logged                    metrics, take_notes
    a run is saved and resumed          state_dict, load_state_dict, identity; saves, dump, take_part
    a trained model is loaded, written  changes_function, fold

Random choices come from (seed, step, place), never from a global generator. What is chosen by measurement is agreed on
by all processes in `end`, and is part of the state.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stretto.batch import Batch
from stretto.checkpoint import Stored
from stretto.config import Config, ModelConfig, OptimConfig, build_config
from stretto.dial import Needs
from stretto.errors import ConfigError
from stretto.execute import Executor
from stretto.memory import Load
from stretto.mesh import Mesh
from stretto.model import Model
from stretto.runtime import Runtime
from stretto.step import Update
from stretto.techniques.foreign import Foreign

Sites = Mapping[str, Sequence[str]]  # role -> names of the modules that play it (model.sites)
SAY_STEPS = "stretto.accelerate(model, ..., steps=NUMBER)"  # how a loop of one's own says how long it is
POST_NORM = (
    "a post-norm block normalises the stream itself, so that leaving it out changes the scale of all that follows,"
    " and training diverges"
)  # why a layer cannot be left out


@dataclass(frozen=True)
class Context:
    """What a technique may know of the run that it is part of."""

    model: ModelConfig | None  # None: the model is Hugging Face's
    device: torch.device
    precision: str  # "fp32", "bf16" or "fp16"
    mesh: Mesh = field(default_factory=Mesh)
    seed: int = 0
    steps: int = 0  # updates of the run
    micro_batches: int = 1  # of an update, over all processes
    seq_len: int = 0  # longest sequence in tokens
    padded: bool = False  # batches are rectangles with padding
    compiled: bool = False  # torch.compile
    sharded: bool = False  # weights are split over processes
    needs: Needs | None = None  # what memory is needed for; None: it is not known
    load: Load | None = None  # what a micro-batch brings, on any number of processes that share it
    part: tuple[int, ...] = ()  # the part of each micro-batch that is this process's; (): all of it


@dataclass(frozen=True)
class At:
    """The place of a micro-batch in a run."""

    step: int  # number of the update, from 0
    index: int  # number of the micro-batch, from 0, over all updates
    training: bool = True


class Technique:
    name: ClassVar[str]
    exact: ClassVar[bool]  # the mathematics of training stays as it is
    changes_function: ClassVar[bool] = False  # a trained model is another function than the plain one
    drops_by_place: ClassVar[bool] = False  # dropout is a function of a token's place in the whole batch
    splits_sequences: ClassVar[bool] = False  # a process has a part of the tokens of each sequence
    default_outside: ClassVar[bool] = False  # models of others have it unless told otherwise
    by_block: ClassVar[bool] = False  # torch.compile takes each block by itself, not the model as a whole
    has_executor: ClassVar[bool] = False  # it brings an executor, which also sums gradients over processes
    asks_products: ClassVar[bool] = False  # layers ask an object for their products, if they have one (ops/products.py)
    keeps_as_told: ClassVar[bool] = False  # blocks keep for the backward pass what their `keep` says (memory.py)

    def __init__(self, cfg: Any, context: Context) -> None:
        self.cfg, self.context = cfg, context

    @classmethod
    def find_options(cls, config: Config, device: torch.device) -> Any | None:
        """The section of the recipe; None: the technique is off."""
        return getattr(config.techniques, cls.name)

    @classmethod
    def read_options(cls, value: Any) -> Any:
        """The section of a recipe from what may stand for it in a call: True, or some of its keys."""
        return getattr(build_config({"techniques": {cls.name: value}}).techniques, cls.name)

    @property
    def key(self) -> str:
        """The place of its options in a recipe."""
        return f"techniques.{self.name}"

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """The type that parameters are kept in; None: as they are."""
        return None

    @property
    def gaps(self) -> bool:
        """Updates leave parameters without a gradient."""
        return False

    def check(self, others: Sequence[Technique]) -> list[str]:
        """The reasons why the technique cannot work here, with the keys to change."""
        return []

    def why_not_by_module(self) -> str:
        """The reason why it cannot work where a process has some of the blocks only; empty: it can."""
        return ""

    @property
    def num_kinds(self) -> int:
        """The number of kinds of updates, each with operations of its own."""
        return 1

    def apply(self, model: nn.Module, sites: Sites) -> None:
        """Changes a model whose parameters have no values yet. State-dict keys stay."""

    def attach(self, model: Foreign) -> None:
        """Changes a model of others, from the outside."""
        raise ConfigError(f"{self.key} works in Stretto's own models only")

    def start_value(self, name: str, value: Tensor) -> Tensor:
        """The first value of a parameter, given that of the plain model."""
        return value

    def build_optimizer(self, groups: list[dict[str, Any]], cfg: OptimConfig) -> torch.optim.Optimizer | None:
        """An optimizer for these groups; None: torch's."""
        return None

    def build_executor(self, model: Model, update: Update, rt: Runtime, optim: OptimConfig) -> Executor | None:
        """What takes micro-batches to updates; None: as there is one without the technique."""
        return None

    def prepare(self, batch: Batch, at: At) -> Batch:
        """The batch as the model gets it. On the host, a pure function: a thread calls it ahead of time."""
        return batch

    def random_keys(self, others: Sequence[Technique]) -> tuple[int, ...]:
        """What torch's generators depend on in this process, besides the seed and the micro-batch."""
        return ()

    def begin(self, step: int, share: float, scaler: torch.amp.GradScaler | None) -> None:
        """Puts the numbers of an update on the device. `share` is the weight of a micro-batch of this process in what
        is averaged over micro-batches."""

    def end(self, step: int) -> None:
        """After an update."""

    def find_obstacles(self) -> list[str]:
        """The reasons why updates cannot be recorded as CUDA graphs."""
        return []

    def graph_key(self, step: int) -> Hashable:
        """Updates with another key launch other kernels: what was recorded until then does not come again. None: this
        update alone does, and is not replayed."""
        return ()

    def pattern(self) -> dict[str, Any]:
        """What the operations of this update depend on besides batches. A recording is for one pattern."""
        return {}

    def metrics(self, num_batches: int) -> dict[str, float]:
        """Numbers for the log: what is measured in batches is a mean over the first `num_batches` of those that were
        evaluated since the last call, 0 without any. The host waits for the device here."""
        return {}

    def take_notes(self) -> list[str]:
        """Lines for the log, each given once."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the options, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    def saves(self, name: str) -> bool | None:
        """Whether this process saves the parameter of that name, which is here as a whole; None: the main process does.
        Every tensor is saved by one process."""
        return None

    def dump(self) -> dict[str, Tensor]:
        """Tensors that a resumed run needs besides, as copies on the CPU; each is given by one process."""
        return {}

    def take_part(self, stored: Stored) -> Stored:
        """This process's part of the state of a whole run."""
        return stored

    @classmethod
    def identity(cls, cfg: Any) -> dict[str, Any] | None:
        """What must be equal for a resumed run to be the same run; None: nothing, as for a technique that is off."""
        return None if cls.exact or cfg is None else asdict(cfg)

    def describe(self) -> str:
        """Words for the log; empty: nothing to say beyond the recipe."""
        return ""

    def fold(self, model: nn.Module) -> nn.Module | None:
        """A plain model that computes what this trained one does; None: there is none."""
        return None
