"""The batches that a model is tried on: small, random, of every kind of padding.

    right    the padding is at the end of rows        ids    own    padding has the id that the configuration says
    left     at their beginning                              other  it has other ids, special ones among them
    holes    between tokens                                  none   there are embeddings instead of ids
    empty    there is a row of nothing else

How a model reads a batch may depend on each of these: a class may be read at the first token, at the last one, or at
the last id that is not the configuration's padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.batch import IGNORE
from stretto.hf.packing import argument_names, pad_id, takes_any_name
from stretto.hf.trial import Batch

SIDES = ("right", "left", "holes", "empty")
IDS = ("own", "other")
LENGTH, TARGET = 6, 5  # tokens of a row; the decoder's of a pair
LENGTHS = (6, 2, 4, 5, 2)  # 19 in all: no chunks divide them


def draw_stack_batches(owner: PreTrainedModel, crosses: bool) -> Iterator[Batch]:
    """For the model around a stack of layers, each as it may or may not be called: of tokens with padding at the end,
    of images, or of hidden states. For a decoder that reads an encoder's output, that too."""
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
        yield {"pixel_values": torch.randn(2, *_image_shape(owner.config), generator=generator).to(like)}
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
    kept = torch.stack([*(_pattern(side, length, many) for side, _, many in rows), torch.ones(length) > 0])
    batch = _draw_text(model, kept, [*(kind for _, kind, _ in rows), "own"], generator)
    if form == "embeds":
        tokens = batch.pop("input_ids")
        batch["inputs_embeds"] = _embedding(model)(tokens).detach()
    if form == "positions":
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        batch["position_ids"] = positions
    if "decoder_input_ids" in names:
        target = torch.stack([*(_pattern(side, TARGET, many) for side, _, many in rows), torch.ones(TARGET) > 0])
        drawn = _draw_text(model, target, ["own"] * len(target), generator)
        batch |= {"decoder_input_ids": drawn["input_ids"], "decoder_attention_mask": drawn["attention_mask"]}
    return batch


def with_labels(model: PreTrainedModel, batch: Batch, called: nn.Module) -> Iterator[tuple[str, Batch]]:
    """The batch with labels of each kind that a model, or the module around it that is called, may take: of tokens, of
    rows, none."""
    if "labels" in argument_names(called):
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
    """With little padding (0), with more, and with hardly anything else (2)."""
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


def _image_shape(config: Any) -> tuple[int, ...]:
    size = config.image_size
    return (config.num_channels, *(size if isinstance(size, list | tuple) else (size, size)))
