"""Work that is put off inside a call of an accelerated model.

A `Call` is what hooks on the outside of a model decide for its inside. A `Lazy` tensor has a shape and no values until
they are needed. There are two kinds of it.

A `Pending` is a sum that waits for the norm behind it. A layer adds each branch to the stream, and a norm reads that:

    x = x + dropout(linear(h))
    h = norm(x)

One kernel can do all of it but the product (ops/norm.py), but the sum is written in the model's own code, between the
modules that accelerate replaces. So inside a layer, while gradients are recorded, a linear layer gives a `Pending`. It
notes what happens to it,

    residual + dropout(product + bias)        or        dropout(activation(product + bias))

and a norm that is given such a sum computes it on the way. Every other use makes it an ordinary tensor. A layer returns
an ordinary tensor, too, unless only the next layer of the stack reads it.

`Logits` wait for the loss. A language model computes logits [N, S, V], and from them the loss, by its own code. In
training with labels the output layer gives `Logits`, which note another view, another precision and a bias on the way.
Cross entropy is then computed from the hidden states, at labelled positions only (ops/cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from stretto.batch import IGNORE, Layout
from stretto.ops.activation import activate
from stretto.ops.cross_entropy import linear_cross_entropy
from stretto.ops.dropout import draw_keys, dropout
from stretto.ops.products import find_product
from stretto.techniques import load_all

if TYPE_CHECKING:
    from stretto.hf.find import Stack
    from stretto.hf.modules import Together
    from stretto.hf.unpad import Packing


# Calls


@dataclass(frozen=True)
class Facts:
    """What the host knows of a mask."""

    tokens: int  # number of tokens that layers run on: those that the mask keeps, or a few more
    longest: int  # upper bound for the tokens of a row
    whole: bool  # whether the mask keeps everything
    sides: frozenset[str]  # places of padding, in the words of find.SIDES
    ids: str  # ids at padding: "own" is the configuration's, "other" another one, "none" unknown


@dataclass(frozen=True, eq=False)
class Known:
    """What the host knows of a batch."""

    masks: tuple[tuple[Tensor, Facts], ...] = ()
    labels: int = 0  # number of labels that are not ignored, or a few more
    positions: int = 0  # number of all labels
    labels_on_padding: bool = False
    fillers: int = 0  # number of sequences behind those of the rows, for tokens that the mask does not keep


NOTHING = Known()


@dataclass(frozen=True)
class Tried:
    """The batches with which a model gave the same results without padding when it was called in a trial."""

    kinds: frozenset[tuple[str, str]] = frozenset()  # side of the padding, and its ids, or "positions" if given
    names: frozenset[str] = frozenset()  # arguments of the call
    labels: str = ""  # labels for "tokens", for "rows", or none
    options: frozenset[str] = frozenset()  # outputs that were asked for

    def covers(self, facts: Facts, given: Collection[str]) -> bool:
        """Whether a batch with such a mask, and arguments of these names, is of a kind that was tried."""
        forms = [facts.ids] + (["positions"] if "position_ids" in given else [])
        return all((side, form) in self.kinds for side in facts.sides for form in forms)


UNTRIED = Tried()


@dataclass
class Request:
    """What the caller of the outermost model wants, and what came of it: all calls inside share it."""

    trial: bool = False  # whether padding is left out of batches that were not tried yet
    planned: bool = False  # whether the caller knows the batch beforehand, and has put it into its `Call`
    loss_only: bool = False  # whether the caller looks at nothing but the loss
    tried: Tried = UNTRIED
    given: frozenset[str] = frozenset()  # arguments of the outermost model
    ids: Tensor | None = None  # tokens of the outermost model
    as_tuple: bool = False  # whether the outermost model returns a tuple, in which a cache has its place
    ran_packed: bool = False  # whether layers ran without padding
    computed_logits: bool = False  # whether logits had to be computed
    useful: set[nn.Module] | None = None  # modules whose `Pending` did more than wait; None: nobody asks


@dataclass(eq=False)
class Inside:
    """What modules of one layer share while the layer runs."""

    keys: list[Tensor] = field(default_factory=list)  # dropout keys that are not used yet
    together: Together | None = None  # linear layers of the attention that runs, which share a product


@dataclass(eq=False)
class Call:
    """A call of a model that has not returned yet."""

    model: nn.Module | None = None  # None: work on behalf of the outer call, or of a caller of models
    outer: Call | None = None  # call of a model around it
    rectangle: bool = False  # whether padding must stay
    lazy: bool = False  # whether logits are wanted for a loss alone
    request: Request = field(default_factory=Request)
    labels: Tensor | None = None
    known: Known = NOTHING
    chain: tuple[nn.Module, ...] = ()  # layers whose result the next layer alone reads
    layer: Inside | None = None  # state of the layer that runs
    stack: Stack | None = None
    own: Packing | None = None
    memory: Packing | None = None  # packing of the encoder's output
    packed: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # arguments of all layers, and packed ones
    angles: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # cosines as given, and what the kernel reads
    dense: dict[tuple[int, int], Layout] = field(default_factory=dict)  # layouts of rectangles, by rows and length
    counted: bool = False  # whether a loss for the known number of labels was computed
    before: Call | None = None  # call that goes on when this one has returned; it need not be a call around it


_call: ContextVar[Call | None] = ContextVar("stretto_call", default=None)
current_call, set_call = _call.get, _call.set


@contextmanager
def calling(call: Call) -> Iterator[Call]:
    """Models that are called in here find `call` around them."""
    before = current_call()
    set_call(call)
    try:
        yield call
    finally:
        set_call(before)


@contextmanager
def inside_layer() -> Iterator[None]:
    """Modules that are called in here may give a `Pending`. A layer that runs again in the backward pass, or is called
    by itself, has no call around it and gets one."""
    with calling(current_call() or Call()) as call:
        before, call.layer = call.layer, Inside()
        try:
            yield
        finally:
            call.layer = before


def current_layer() -> Inside | None:
    """The state of the layer that runs; None outside of layers, and in compiled code."""
    call = None if torch.compiler.is_compiling() else current_call()
    return None if call is None else call.layer


# Tensors without values

_PROPERTIES: list[Any] = [Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.is_cuda, Tensor.layout]


class Lazy(Tensor):
    known: ClassVar[set[Any]] = {p.__get__ for p in _PROPERTIES} | {
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point,
    }  # functions that a shape without values can answer  # fmt: skip

    own_shape: torch.Size
    own_dtype: torch.dtype

    @classmethod
    def make(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.own_shape, made.own_dtype = shape, dtype
        return made

    # Asked for many times in each layer. Torch's own would go through `__torch_function__`.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.own_shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.own_dtype

    @classmethod
    def note(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an operation, where it can be had without the values."""
        raise TypeError("Lazy is abstract")

    def compute(self) -> Tensor:
        raise TypeError("Lazy is abstract")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in cls.known:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        noted = cls.note(func, args, kwargs)
        if noted is not None:
            return noted
        args, kwargs = tree_map_only(cls, lambda lazy: lazy.compute(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *others: Any) -> Any:
        options = " and ".join([*(f"{cls.name}=False" for cls in load_all() if cls.default_outside), "loss=False"])
        raise RuntimeError(f"{func} met a tensor that was not computed; accelerate with {options} to have all of them")

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.compute())


def compute(x: Tensor) -> Tensor:
    return x.compute() if isinstance(x, Lazy) else x


# Sums

_ADDS = (Tensor.add, torch.add)


class Pending(Lazy):
    maker: nn.Module  # module whose product it is
    product: Tensor | None  # [..., C]; None once `made` exists
    bias: Tensor | None  # [C]
    activation: str | None
    p: float  # dropout probability
    key: Tensor | None
    residual: Tensor | None  # [..., C]
    made: Tensor | None  # [..., C]

    @staticmethod
    def __new__(
        cls,
        maker: nn.Module,
        product: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
        p: float = 0.0,
        key: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Pending:
        dtype = product.dtype if residual is None else residual.dtype
        made: Pending = cls.make(product.shape, dtype, product.device)
        made.maker, made.product, made.bias, made.activation = maker, product, bias, activation
        made.p, made.key, made.residual, made.made = p, key, residual, None
        return made

    @classmethod
    def note(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if func in _ADDS and len(args) == 2 and not kwargs:
            return _note_sum(*args)
        if func is F.dropout and isinstance(args[0], Pending):
            return args[0]._note_dropout(*args[1:], **kwargs)
        return None

    def _note_dropout(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Pending | None:
        if self.activation is not None:
            self.note_use()
        if not training or p == 0.0:
            return self
        if self.product is None or self.key is not None or self.residual is not None or not 0.0 < p < 1.0 or inplace:
            return None
        return Pending(self.maker, self.product, self.bias, self.activation, p, _draw_key(self.product))

    def note_use(self) -> None:
        call = current_call()
        if call is not None and call.request.useful is not None:
            call.request.useful.add(self.maker)

    def waits_for_activation(self) -> bool:
        """Whether it is product + bias, and nothing else."""
        return self.product is not None and self.residual is None and self.key is None and self.activation is None

    def normalise(self, add_normalised: Callable[..., tuple[Tensor, Tensor]]) -> Tensor | None:
        """The norm of a sum, which computes the sum as well; None where one kernel cannot do both."""
        if self.product is None or self.residual is None:
            return None
        self.note_use()
        rows, stream = self.product.to(self.dtype).flatten(0, -2), self.residual.flatten(0, -2)
        y, stream = add_normalised(rows, stream, self.bias, self.p, self.key)
        self._keep(stream.view(self.shape))
        return y.view(self.shape)

    def compute(self) -> Tensor:
        if self.product is not None:
            x = self.product.flatten(0, -2)
            if self.activation is not None:
                keep = getattr(self.maker, "stretto_keep", "input")
                x = activate(x, self.bias, self.activation, self.p, self.key, keep)
            else:
                x = x if self.bias is None else x + self.bias.to(x.dtype)
                x = x if self.key is None else dropout(x, self.p, self.key)
            x = x.view(self.product.shape)
            self._keep(x if self.residual is None else self.residual + x)
        assert self.made is not None
        return self.made

    def _keep(self, made: Tensor) -> None:
        self.made = made
        self.product = self.bias = self.key = self.residual = None


def _note_sum(first: Any, second: Any) -> Pending | None:
    """The sum of a branch and the stream, in either order."""
    for branch, residual in ((first, second), (second, first)):
        if not isinstance(branch, Pending) or branch.product is None:
            continue
        if branch.residual is None and branch.activation is None and isinstance(residual, Tensor):
            residual = compute(residual)
            wide = torch.promote_types(residual.dtype, branch.product.dtype) == residual.dtype  # as under autocast
            if residual.shape == branch.product.shape and wide:
                return Pending(branch.maker, branch.product, branch.bias, None, branch.p, branch.key, residual)
    return None


def _draw_key(like: Tensor) -> Tensor:
    """A key for dropout; keys for several places of a layer are drawn at once."""
    layer = current_layer()
    keys = [] if layer is None else layer.keys
    if not keys:
        keys += draw_keys(like, 4).unbind()
    return keys.pop()


# Logits

_GRAD_FN: Any = Tensor.grad_fn
_PRODUCTS = (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, torch.multiply)
_QUOTIENTS = (Tensor.div, Tensor.__truediv__, torch.div, torch.true_divide)


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to compute logits: scale * (head(hidden) + bias)."""

    head: nn.Module
    plain: Callable[[Tensor], Tensor]  # `forward` of the head's own class
    hidden: Tensor  # [T, C]
    versions: list[int]  # versions of the head's parameters when it was called
    autocast: torch.dtype | None
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    made: list[Tensor] = field(default_factory=list)  # logits [T, V], once they were needed; views share them
    stale: list[bool] = field(default_factory=list)  # an entry once an optimizer has changed the head's weights

    def __post_init__(self) -> None:
        _waiting.add(self)


_waiting: WeakSet[Recipe] = WeakSet()


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Runs behind every step of any optimizer: torch's fused ones change weights without a new version."""
    if _waiting:
        written = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for recipe in _waiting:
            if any(id(p) in written for p in recipe.head.parameters()):
                recipe.stale.append(True)


register_optimizer_step_post_hook(_note_step)


class Logits(Lazy):
    known = Lazy.known | {_GRAD_FN.__get__}  # None: there is no history yet, and DistributedDataParallel asks for it
    recipe: Recipe

    @staticmethod
    def __new__(cls, recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> Logits:
        made: Logits = cls.make(shape, dtype, recipe.hidden.device)
        made.recipe = recipe
        return made

    @classmethod
    def note(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        return args[0]._note(func, args[1:], kwargs) if args and isinstance(args[0], Logits) else None

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Logits that were computed may have been changed since: they are ordinary tensors from then on."""
        if self.recipe.made:
            return None
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if func is Tensor.contiguous and not args:
            return self
        if kwargs:
            return None
        if func in (Tensor.view, Tensor.reshape):
            return self._view(args)
        if len(args) == 1 and func in (Tensor.add, Tensor.__add__, torch.add):
            return self._add(args[0])
        if len(args) == 1 and isinstance(args[0], int | float) and args[0]:
            if func in _PRODUCTS:
                return self._copy(self.dtype, scale=self.recipe.scale * args[0])
            if func in _QUOTIENTS:
                return self._copy(self.dtype, scale=self.recipe.scale / args[0])
        if len(args) == 1 and func in (Tensor.to, Tensor.type) and isinstance(args[0], torch.dtype):
            return self._cast(args[0])
        if func is Tensor.float and not args:
            return self._cast(torch.float32)
        return self._copy(self.dtype) if func is Tensor.clone and not args else None  # DDP clones every output

    def _copy(self, dtype: torch.dtype, **changes: Any) -> Logits:
        return Logits(replace(self.recipe, made=[], **changes), self.shape, dtype)

    def _cast(self, dtype: torch.dtype) -> Logits:
        return self if dtype == self.dtype else self._copy(dtype)

    def _view(self, args: tuple[Any, ...]) -> Logits | None:
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        if not all(isinstance(size, int) for size in shape) or shape[-1] != self.shape[-1]:
            return None
        return Logits(self.recipe, torch.empty(self.shape, device="meta").view(*shape).shape, self.dtype)

    def _add(self, other: Any) -> Logits | None:
        """The sum with a bias that is the same for every token."""
        classes = self.shape[-1]
        if not isinstance(other, Tensor) or other.numel() != classes or other.shape[-1] != classes:
            return None
        if self.recipe.scale != 1.0:
            return None
        bias = _add_biases(self.recipe.bias, other.flatten())
        return self._copy(torch.promote_types(self.dtype, other.dtype), bias=bias)

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
        if not plain or self.ndim != 2 or target.ndim != 1 or target.is_floating_point():
            return None
        labelled = target != ignore_index
        call, count = current_call(), labelled.sum()
        is_known = call is not None and ignore_index == IGNORE and target.numel() == call.known.positions
        room = call.known.labels if call is not None and is_known and not call.counted else int(count)
        if call is not None:
            call.counted = True  # a second loss may have other labels
        # Not `nonzero`, for which the host would wait. Where there is room for more, labels that are ignored follow.
        rows = (~labelled).byte().argsort(stable=True)[:room]
        loss = self._sum_losses(rows, target[rows], label_smoothing, ignore_index)
        return loss if reduction == "sum" else loss / count

    def _sum_losses(self, rows: Tensor, labels: Tensor, smoothing: float, ignore: int) -> Tensor:
        head, bias, scale = self.recipe.head, self.recipe.bias, self.recipe.scale
        x = self.recipe.hidden[rows]
        if not isinstance(head, nn.Linear):  # layers in front of the vocabulary: these rows go through them
            with logits_wanted_for_loss(True):
                inner = self.recipe.plain(x)
            if not isinstance(inner, Logits) or inner.recipe.scale != 1.0:
                inner = scale * (inner if bias is None else inner + bias)
                return F.cross_entropy(inner.float(), labels, None, None, ignore, None, "sum", smoothing)
            x, head = inner.recipe.hidden, inner.recipe.head
            bias = _add_biases(bias, inner.recipe.bias)
        bias = _add_biases(bias, head.bias)  # type: ignore[arg-type]
        if scale != 1.0:
            x, bias = x * scale, None if bias is None else bias * scale
        weight: Tensor = head.weight  # type: ignore[assignment]
        product = find_product(head)
        return linear_cross_entropy(x, weight, bias, labels, smoothing, ignore=ignore, product=product)

    def compute(self) -> Tensor:
        recipe, call = self.recipe, current_call()
        if not recipe.made:
            if call is not None:
                call.request.computed_logits = True
            versions = [parameter._version for parameter in recipe.head.parameters()]
            if recipe.stale or versions != recipe.versions:
                raise RuntimeError(
                    "the logits of an accelerated model are computed when they are used, and its weights have changed "
                    "since: read them before the optimizer's step, or accelerate with loss=False"
                )
            precision = torch.autocast(recipe.hidden.device.type, recipe.autocast, enabled=recipe.autocast is not None)
            with logits_wanted_for_loss(False), torch.enable_grad(), precision:
                logits = recipe.plain(recipe.hidden)
                logits = logits if recipe.bias is None else logits + recipe.bias
                recipe.made.append((logits if recipe.scale == 1.0 else logits * recipe.scale).to(self.dtype))
        return recipe.made[0].view(self.shape)


def _add_biases(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def logits_wanted_for_loss(lazy: bool, rectangle: bool = True) -> AbstractContextManager[Call]:
    outer = current_call()
    known, request = (NOTHING, Request()) if outer is None else (outer.known, outer.request)
    return calling(Call(None, outer, rectangle, lazy, request=request, known=known))


def is_planned() -> bool:
    """Whether the caller of the model knows its batch beforehand."""
    call = current_call()
    return call is not None and call.request.planned
