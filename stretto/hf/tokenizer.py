"""A tokenizer as `AutoTokenizer` wants it: tokenizer.json, and what its special tokens are for.

It gives the ids that we do, with the special tokens around them that the model has been trained with. One difference is
wanted: the text of a special token ("[MASK]" in a prompt) becomes that token, where a corpus may not contain any.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.config import ModelConfig
from stretto.data import Tokenizer
from stretto.data.tokenizer import NUM_BYTES, SPECIALS, ByteTokenizer
from stretto.errors import DataError

if TYPE_CHECKING:
    import tokenizers

# What surrounds a text while training, where {bos} and {eos} stand for these tokens.
_AROUND = {
    "decoder": ("{bos} $A", "{bos} $A $B"),
    "encoder": ("{bos} $A {eos}", "{bos} $A {eos} $B:1 {eos}:1"),
    "encoder-decoder": ("$A {eos}", "$A $B {eos}"),
}
_ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "pad", "mask_token": "mask"}
_UNKNOWN = ("<unk>", "[UNK]", "<|unk|>")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, cfg: ModelConfig) -> None:
    inner = to_library(tokenizer)
    ids = {key: find_token(tokenizer, role) for key, role in _ROLES.items()}
    ids["unk_token"] = next((i for i in map(inner.token_to_id, _UNKNOWN) if i is not None), None)
    names = {key: str(inner.id_to_token(i)) for key, i in ids.items() if i is not None}
    if cfg.kind == "encoder":
        names |= {"cls_token": names["bos_token"], "sep_token": names["eos_token"]}
    if inner.post_processor is None:  # one from elsewhere knows itself what to add
        inner.post_processor = _surround(cfg.kind, inner, names["bos_token"], names["eos_token"])
    reads = ["input_ids", "attention_mask", *(["token_type_ids"] if cfg.token_types else [])]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # all is in tokenizer.json; transformers 4 and 5 know this name
        "model_max_length": cfg.max_len,
        "model_input_names": reads,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(inner.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | names, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")


def to_library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """One of the `tokenizers` library with the same ids."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    if not isinstance(tokenizer, ByteTokenizer):
        return Inner.from_str(tokenizer.to_json())
    # Byte-level BPE without merges: each byte is one visible character, and no two ever become one token.
    inner = Inner(models.BPE({letter: byte for byte, letter in enumerate(_byte_letters())}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    return inner


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in the library: the visible ones for themselves, others from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(NUM_BYTES)]


def _surround(kind: str, inner: tokenizers.Tokenizer, bos: str, eos: str) -> Any:
    from tokenizers import processors

    single, pair = (text.format(bos=bos, eos=eos) for text in _AROUND[kind])
    specials = [(name, inner.token_to_id(name)) for name in dict.fromkeys((bos, eos))]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)


def find_token(tokenizer: Tokenizer, role: str) -> int | None:
    """The id of the token with this role, if there is one."""
    try:
        return tokenizer.find_special(role)
    except DataError:
        return None
