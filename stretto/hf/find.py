"""What the modules of a Hugging Face model do, found by running them, and the batches that a model is run on.

A release of transformers renames and rewrites classes; what a module computes stays. So a module is recognised by its
children (linear layers, norms, activations, dropouts) and by the order in which it calls them with a few random rows:

    calls    arguments    role
    LA       1            dense           L linear, A activation, N norm, D dropout (may be missing)
    LAN      1            transform
    LAL      1            mlp             with D before or behind the second L
    LALL     1            gated mlp
    LDN      2            residual norm

That is a guess; what decides is that the module that takes its place gives the same result (trial.py).

Batches are small, random, and of every kind of padding, since how a model reads a batch may depend on each of these: a
class may be read at the first token, at the last one, or at the last id that is not the configuration's padding.

    right    the padding is at the end of rows        ids    own    padding has the id that the configuration says
    left     at their beginning                              other  it has other ids, special ones among them
    holes    between tokens                                  none   there are embeddings instead of ids
    empty    there is a row of nothing else
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stretto.batch import IGNORE
from stretto.hf import modules
from stretto.hf.modules import NONE, Parts, RuledNorm, describe, weight_of
from stretto.ops.activation import GATES
from stretto.ops.norm import MAX_WIDTH

log = logging.getLogger(__name__)
NAME = "stretto"  # name of our attention in transformers' interface
ROWS = 64  # number of rows in which an undeclared dropout surely drops something
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
}
ROLES: list[tuple[str, int, str, type[modules.Recognised]]] = [  # calls, arguments, role, what takes its place
    ("LA", 1, "dense", modules.ActivatedLinear),
    ("LAN", 1, "transform", modules.ActivatedLinear),
    ("LAD?LD?", 1, "mlp", modules.WholeMLP),
    ("LALD?LD?", 1, "gated mlp", modules.WholeGatedMLP),
    ("LD?N", 2, "residual norm", modules.ResidualNorm),
]
SIDES = ("right", "left", "holes", "empty")
IDS = ("own", "other")
LENGTH, TARGET = 6, 5  # tokens of a row; of a decoder's row beside an encoder
LENGTHS = (6, 2, 4, 5, 2)  # tokens that rows keep; their sum is a prime: no chunks divide it
Batch = dict[str, Any]


@cache
def own_forward(kind: Any) -> Any:
    """The `forward` of a class, or of the class that one of ours was mixed into."""
    kinds = (base for base in kind.__mro__ if "forward" in vars(base) and not base.__module__.startswith("stretto."))
    return vars(next(kinds))["forward"]


@cache
def _find_parameters(kind: Any) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(own_forward(kind)).parameters.items())[1:])


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of a module's own `forward`, without `self`."""
    kind: Any = type(module)
    return _find_parameters(kind)


def argument_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(parameters_of(module))


def takes_any_name(module: nn.Module) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(module).values())


def given_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(argument_names(module), args, strict=False)) | kwargs


def find_tokens(given: Mapping[str, Any]) -> Any:
    """The ids or embeddings that a model is given."""
    tokens = given.get("input_ids")
    return given.get("inputs_embeds") if tokens is None else tokens


def replace_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **values: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with other values for some of them, which stay positional if they were."""
    names = argument_names(module)[: len(args)]
    positional = [values.pop(name, value) for name, value in zip(names, args, strict=False)]
    return (*positional, *args[len(names) :]), kwargs | values


def find_owners(model: nn.Module, name: str) -> Iterator[tuple[str, PreTrainedModel]]:
    """The models around a module, the innermost first, with their names."""
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        if isinstance(module, PreTrainedModel):
            yield name, module


def pad_id(model: PreTrainedModel) -> int | None:
    found = getattr(model.config.get_text_config(), "pad_token_id", None)
    return found if isinstance(found, int) else None


@dataclass(frozen=True)
class Site:
    """A module that plays a role, or looks as if it did: then `problem` says why it stays as it is."""

    name: str
    role: str
    module: nn.Module
    ours: type[nn.Module] | None = None  # class that can take its place
    parts: Parts = NONE
    problem: str | None = None
    remark: str = ""  # addition to the report's line, where there is no problem


def find_sites(model: nn.Module) -> list[Site]:
    """Every module that has a role, in the order of the model."""
    found: list[Site] = []
    kinds: dict[Any, Site | None] = {}  # modules of one class and shape are looked at once
    for name, module in model.named_modules():
        key = _kind(module)
        if key not in kinds:
            try:
                kinds[key] = _find_role(name, module)
            except Exception as error:  # a module that cannot be looked at is left alone
                log.debug("%s: %s", name, error)
                kinds[key] = None
        site = kinds[key]
        if site is not None:
            found.append(replace(site, name=name, module=module))
    return found


def _kind(module: nn.Module) -> Any:
    children = tuple((name, type(child), _shape(child), repr(child)) for name, child in module.named_children())
    return type(module), _shape(module), children if len(children) < 8 else id(module)


def _shape(module: nn.Module) -> Any:
    return tuple((name, p.shape, p.dtype) for name, p in module.named_parameters(recurse=False))


def _find_role(name: str, module: nn.Module) -> Site | None:
    if acts_as_norm(module):
        width = next(module.parameters()).shape[0]
        problem = f"{width} channels: more than {MAX_WIDTH}" if width > MAX_WIDTH else None
        return Site(name, "norm", module, modules.OnePassNorm, _find_formula(module), problem)
    if calls_attention_interface(module):
        return Site(name, "attention", module)
    letters = {child: _letter(part) for child, part in module.named_children()}
    arity = _arity(module)
    known = None not in letters.values() and "L" in letters.values() and arity in (1, 2)
    calls = _trace(module, arity) if known else None
    word = "".join(str(letters[child]) for child, _ in calls or ())
    for pattern, arguments, role, ours in ROLES if calls else ():
        if arity == arguments and re.fullmatch(pattern, word):
            assert calls is not None
            return Site(name, role, module, ours, *_find_parts(module, calls, letters))
    return None


def acts_as_norm(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if isinstance(module, RuledNorm):
        return True
    if isinstance(module, nn.LayerNorm):
        return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and "weight" in names
    has_eps = any(isinstance(getattr(module, eps, None), float) for eps in ("variance_epsilon", "eps"))
    return names == ["weight"] and next(module.parameters()).ndim == 1 and has_eps and not list(module.children())


def _find_formula(module: nn.Module) -> Parts:
    """The formula whose result is nearest to that of a norm with a weight alone: x / rms(x) times its weight, times
    1 + weight, or LayerNorm without a bias."""
    if isinstance(module, RuledNorm | nn.LayerNorm):
        return NONE
    weight = module.weight.detach().float()  # type: ignore[operator]
    x = torch.randn(1, 8, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device) + 1
    with quietly(module):
        y = module(*in_precision_of(module, [x])).float()
    scaled, shape = F.rms_norm(x, weight.shape), weight.shape
    formulas = {
        NONE: scaled * weight,
        Parts(shifted=True): scaled * (1 + weight),
        Parts(centred=True): F.layer_norm(x, shape, weight),
    }
    return min(formulas, key=lambda parts: float((y - formulas[parts]).norm()))


def _letter(module: nn.Module) -> str | None:
    if type(module) in (nn.Linear, Conv1D):
        return "L"
    if isinstance(module, nn.Dropout):
        return "D"
    if acts_as_norm(module):
        return "N"
    return "A" if is_activation(module) else None


def is_activation(module: nn.Module) -> bool:
    """Whether a module may be an activation: it has a `forward` and nothing else of its own."""
    leaf = not list(module.children()) and not list(module.parameters()) and not list(module.buffers())
    runs = any("forward" in vars(base) for base in type(module).__mro__ if base is not nn.Module)
    return leaf and runs and not isinstance(module, nn.Identity | nn.Dropout)


def _arity(module: nn.Module) -> int:
    """The number of arguments that `forward` has to be given."""
    plain = [p for p in parameters_of(module).values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in plain)


def calls_attention_interface(module: nn.Module) -> bool:
    """Whether attention goes through the functions that are registered with transformers."""
    kind: Any = type(module)
    forward = inspect.unwrap(own_forward(kind))
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())


def _trace(module: nn.Module, arity: int) -> list[tuple[str, int]] | None:
    """The children that are called, in order, and the width of what each is given."""
    dense = [child for child in module.children() if _letter(child) == "L"]
    for width in dict.fromkeys(weight_of(child).shape[1] for child in dense):
        calls: list[tuple[str, int]] = []

        def note(name: str, calls: list[tuple[str, int]] = calls) -> Any:
            return lambda _, args: calls.append((name, args[0].shape[-1]))

        try:
            with ExitStack() as hooks, quietly(module):
                for name, child in module.named_children():
                    hooks.enter_context(child.register_forward_pre_hook(note(name)))
                module(*in_precision_of(module, draw_inputs(module, arity, width)))
            return calls
        except Exception:
            continue  # it takes another width, or is not a function of plain rows
    return None


def _find_parts(
    module: nn.Module, calls: list[tuple[str, int]], letters: dict[str, str | None]
) -> tuple[Parts, str | None]:
    by_letter: dict[str, list[str]] = {letter: [] for letter in "LNDA"}
    for child, _ in calls:
        by_letter[str(letters[child])].append(child)
    dense, norms, drops, acts = by_letter.values()
    unused = [child for child in letters if child not in dict(calls)]
    kind = find_activation(module.get_submodule(acts[0])) if acts else None
    inner = weight_of(module.get_submodule(dense[-1])).shape[1]
    outer = dict(calls)[dense[0]]
    in_one = len(dense) == 2 and weight_of(module.get_submodule(dense[0])).shape[0] == 2 * inner  # gate and value
    gated = in_one or len(dense) == 3
    if gated:
        kind = next((gate for gate, function in GATES.items() if function == kind), None)
    problem = None
    if acts and kind is None:
        problem = f"{'a gate by' if gated else 'activation'} {module.get_submodule(acts[0])}: no kernel"
    elif len(drops) > 1 or unused:
        problem = f"more children than its role has: {', '.join(drops[1:] + unused)}"
    elif drops and len(dense) > 1 and inner == outer:
        problem = "where its dropout stands cannot be seen: both widths are equal"
    elif gated and len({module.get_submodule(child).bias is None for child in dense[:2]}) > 1:
        problem = "only one of gate and value has a bias"
    inside = bool(drops) and dict(calls)[drops[0]] == inner and len(dense) > 1
    used = tuple((child, describe(module.get_submodule(child))) for child in dict(calls))
    norm, drop = (next(iter(names), None) for names in (norms, drops))
    return Parts(tuple(dense), norm, drop, kind or "", inside, children=used), problem


def find_activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """The kind of an activation, by its values."""
    x = torch.linspace(-6, 6, 49, dtype=torch.float64)
    try:
        y = function(x)
    except Exception:  # what is no function of numbers is none
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    close = [kind for kind, exact in ACTIVATIONS.items() if (y - exact(x)).abs().max() < 1e-6]
    return close[0] if close else None


def draw_inputs(module: nn.Module, arity: int, width: int) -> list[Tensor]:
    """Random rows [1, ROWS, width] of all sizes, half of them with a mean that is not zero; the second argument, a
    residual, is as wide as the output."""
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)
    dense = [child for child in module.children() if _letter(child) == "L"]
    widths = [width, weight_of(dense[-1]).shape[0]] if arity == 2 else [width]
    size = torch.logspace(-2, 1, ROWS)[:, None]
    mean = torch.arange(ROWS)[:, None] % 2
    return [(size * (torch.randn(1, ROWS, w, generator=generator) + mean)).to(device) for w in widths]


def in_precision_of(module: nn.Module, inputs: Any) -> Any:
    """Inputs, a dictionary or a list, for a module that may be on the stage, where its precision is another."""
    dtype = next(module.parameters()).dtype
    return tree_map_only(Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, inputs)


@contextmanager
def quietly(module: nn.Module, training: bool = False) -> Iterator[None]:
    """Sets a module to eval mode, or to training mode without the dropout of its children, for a while. What modules
    note meanwhile, in attributes or buffers, is forgotten. Gradients are not recorded, and the state of random
    generators stays."""
    before = [(m, dict(vars(m)), dict(m._buffers)) for m in module.modules()]
    devices = [p.device for p in module.parameters() if p.is_cuda][:1]
    try:
        module.train(training)
        for m, *_ in before:
            if isinstance(m, nn.Dropout):
                m.p = 0.0
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        for m, attributes, buffers in before:
            vars(m).clear()
            vars(m).update(attributes)
            m._buffers.clear()
            m._buffers.update(buffers)


class Stack:
    """A list of layers, and the model that calls them one after the other and knows the attention mask."""

    def __init__(
        self, name: str, owner: PreTrainedModel, path: str, layers: nn.ModuleList, attentions: list[nn.Module]
    ) -> None:
        """`path` is the path of the layers in their owner, `attentions` are those of the first layer."""
        self.name, self.owner, self.path, self.layers, self.attention = name, owner, path, layers, attentions[0]
        self.causal = bool(getattr(self.attention, "is_causal", True))
        self.crosses = len(attentions) > 1  # whether its layers also attend to an encoder's output
        # Whether attention takes a bias by distance, as T5's does.
        self.relative = any("position_bias" in inspect.signature(type(m).forward).parameters for m in attentions)
        self.depth = _depth(owner)
        self.inside = tuple(layers.modules())[1:]  # the layers and all modules in them
        self.members = tuple(layers)
        # Distances beyond which tokens do not see each other.
        self.windows = {w for thing in (owner.config, *layers.modules()) for w in _windows(thing)}
        takes_mask = "attention_mask" in inspect.signature(type(layers[0]).forward).parameters
        self.problem = None if takes_mask else "its layers take no attention_mask"

    def is_whole(self) -> bool:
        """Whether the owner still has these layers, all of them, and they the attention that was chosen for them."""
        same = self.owner.get_submodule(self.path) is self.layers and _depth(self.owner) == self.depth
        same = same and len(self.layers) <= len(self.members)
        same = same and all(now is then for now, then in zip(self.layers, self.members, strict=False))
        causal = bool(getattr(self.attention, "is_causal", True)) == self.causal
        return same and causal and self.attention.config._attn_implementation == NAME  # type: ignore[union-attr]

    def exceeds_window(self, longest: int) -> bool:
        """Whether some tokens of such a row do not see each other. The configuration's window may be another by now."""
        return any(longest > window for window in (*self.windows, *_windows(self.owner.config)))


def find_stacks(model: nn.Module) -> list[Stack]:
    """Every list of layers with attention in them."""
    found = []
    for name, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            continue
        inside = [[m for m in layer.modules() if calls_attention_interface(m)] for layer in layers]
        if not all(inside) or len({type(layer) for layer in layers}) > 1:
            continue
        for owner_name, owner in islice(find_owners(model, name), 1):
            path = name[len(owner_name) :].lstrip(".")
            found.append(Stack(owner_name, owner, path, layers, inside[0]))
    owners = [stack.owner for stack in found]
    return [stack for stack in found if owners.count(stack.owner) == 1]


def _windows(thing: Any) -> list[int]:
    """The sizes of windows and chunks of tokens that a configuration or a module has as attributes."""
    named = [value for name, value in vars(thing).items() if re.search(r"(window|chunk)(_size)?$", name)]
    return [value for value in named if isinstance(value, int) and value > 0]


def _depth(owner: PreTrainedModel) -> Any:
    """The number of layers by the owner's configuration."""
    return getattr(owner.config, "num_hidden_layers", None)


def draw_stack_batches(owner: PreTrainedModel, crosses: bool) -> Iterator[Batch]:
    """Batches for the model around a stack of layers, which may or may not take them: tokens with padding at the end,
    images, or hidden states; for a decoder that reads an encoder's output, that output too."""
    names, generator = argument_names(owner), torch.Generator().manual_seed(0)
    like = next(owner.parameters())
    if "input_ids" in names:
        kept = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
        batch = _draw_text(owner, kept, ["own"] * len(LENGTHS), generator)
        if crosses:
            memory = torch.randn(len(LENGTHS), LENGTH, _width(owner), generator=generator).to(like)
            other = batch["attention_mask"].roll(1, 0)
            yield batch | {"encoder_hidden_states": memory, "encoder_attention_mask": other}
            batch = batch | {"encoder_hidden_states": memory}
        yield batch
    elif "pixel_values" in names:
        size = owner.config.image_size
        shape = owner.config.num_channels, *(size if isinstance(size, list | tuple) else (size, size))
        yield {"pixel_values": torch.randn(2, *shape, generator=generator).to(like)}
    elif names and names[0] in ("hidden_states", "inputs_embeds", "hidden_state"):
        yield {names[0]: torch.randn(2, LENGTH, _width(owner), generator=generator).to(like)}


def draw_padded(
    model: PreTrainedModel, sides: Sequence[str], ids: Sequence[str], form: str, length: int = LENGTH
) -> Batch | None:
    """Rows for each side and kind of ids, and one without padding; None where there is no such form of a batch:
    "ids", "embeds", or "positions", which are given beside ids."""
    names, generator = argument_names(model), torch.Generator().manual_seed(1)
    if "input_ids" not in names or (form == "embeds" and "inputs_embeds" not in names):
        return None
    if form == "positions" and "position_ids" not in names:
        return None
    rows = [(side, kind, many) for kind in ids for side in sides for many in range(3 if side != "empty" else 1)]
    kept, target = (
        torch.stack([*(_pattern(side, size, many) for side, _, many in rows), torch.ones(size) > 0])
        for size in (length, TARGET)
    )
    batch = _draw_text(model, kept, [*(kind for _, kind, _ in rows), "own"], generator)
    if form == "embeds":
        batch["inputs_embeds"] = _embedding(model)(batch.pop("input_ids")).detach()
    if form == "positions":
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    if "decoder_input_ids" in names:
        drawn = _draw_text(model, target, ["own"] * len(target), generator)
        batch |= {"decoder_input_ids": drawn["input_ids"], "decoder_attention_mask": drawn["attention_mask"]}
    return batch


def with_labels(model: PreTrainedModel, batch: Batch, called: nn.Module) -> Iterator[tuple[str, Batch]]:
    """The batch with labels of each kind that a model, or the module around it that is called, may take: of tokens, of
    rows, none."""
    if "labels" in argument_names(called) or (takes_any_name(called) and "labels" in argument_names(model)):
        pair = "decoder_input_ids" in batch
        mask = batch["decoder_attention_mask" if pair else "attention_mask"]
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        classes = int(getattr(model.config, "num_labels", 2)) if head is None else len(head.weight)
        labels = torch.randint(classes, mask.shape, generator=torch.Generator().manual_seed(2)).to(mask.device)
        real = mask != 0
        real[:, 1:] &= mask[:, :-1] != 0  # a causal model predicts from the position before
        plain = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
        of_tokens = plain | {"labels": labels.where(real, IGNORE)}
        yield "tokens", of_tokens
        some = real.any(1)  # mBART fails at a row without labels
        yield "tokens", {name: of[some] if isinstance(of, Tensor) else of for name, of in of_tokens.items()}
        rows = torch.arange(len(mask), device=mask.device) % max(classes, 1)
        alone = {name: value for name, value in plain.items() if name != "decoder_attention_mask"}
        yield "rows", alone | {"labels": rows.float() if classes == 1 else rows}
    yield "", batch


def draw_labelled(model: PreTrainedModel) -> Iterator[tuple[str, Batch]]:
    """A batch with padding at the end of rows, with each kind of labels."""
    batch = draw_padded(model, ("right",), ("own",), "ids")
    if batch is not None:
        yield from with_labels(model, batch, model)


def masks_of(batch: Batch) -> list[Tensor]:
    return [batch[name] for name in ("attention_mask", "decoder_attention_mask") if name in batch]


def _draw_text(model: PreTrainedModel, kept: Tensor, ids: Sequence[str], generator: torch.Generator) -> Batch:
    embedding = _embedding(model)
    size, device, names = len(embedding.weight), embedding.weight.device, argument_names(model)
    special = _special_ids(model.config)
    tokens = torch.randint(size, kept.shape, generator=generator)
    ordinary = next(i for i in range(size) if i not in special)
    tokens = tokens.where(~torch.isin(tokens, torch.tensor([-1, *special])), ordinary)
    if model.config.is_encoder_decoder and isinstance(model.config.eos_token_id, int):
        last = (kept * torch.arange(1, kept.shape[1] + 1)).argmax(1)
        tokens[torch.arange(len(kept)), last] = model.config.eos_token_id
    own = pad_id(model)
    others = [i for i in (ordinary, *special) if i != own and 0 <= i < size]
    odd = torch.tensor(others).repeat(kept.numel() // len(others) + 1)[: kept.numel()].view(kept.shape)
    usual = torch.full_like(tokens, own if own is not None and 0 <= own < size else ordinary)
    padding = torch.where(torch.tensor([kind != "other" for kind in ids])[:, None], usual, odd)
    batch: Batch = {"input_ids": tokens.where(kept, padding).to(device), "attention_mask": kept.long().to(device)}
    if "token_type_ids" in names:
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    inner = takes_any_name(model) and getattr(model.config.get_text_config(), "use_cache", False)  # handed on by name
    return batch | ({"use_cache": False} if "use_cache" in names or inner else {})


def _pattern(side: str, length: int, many: int) -> Tensor:
    """A mask of one row, bool [length]: with little padding (0), with more, and with hardly anything else (2)."""
    kept = torch.ones(length, dtype=torch.bool)
    padding = (1, length // 2, length - 1)[many]
    if side == "right":
        kept[length - padding :] = False
    elif side == "left":
        kept[:padding] = False
    elif side == "holes":
        kept[1 : -1 if many else 2] = False
        kept[length // 2] |= many == 1
    else:
        kept[:] = False
    return kept


def _special_ids(config: Any) -> list[int]:
    """The ids that a configuration names: of padding, of ends, of images."""
    named = {**config.get_text_config().to_dict(), **config.to_dict()}
    found = [value for name, value in named.items() if name.endswith(("token_id", "token_index"))]
    flat = [i for value in found for i in (value if isinstance(value, list) else [value])]
    return sorted({i for i in flat if isinstance(i, int)})


def _embedding(model: PreTrainedModel) -> Any:
    return model.get_input_embeddings()


def _width(owner: PreTrainedModel) -> int:
    found = getattr(owner.config, "hidden_size", None)
    return found if isinstance(found, int) else _embedding(owner).weight.shape[1]
