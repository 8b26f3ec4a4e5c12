"""Conversations as text, of which the answers are learned: by the chat template of a Hugging Face folder, or plainly.

A conversation is divided into segments, by turns what is asked and what is answered. The plain form has a line with the
role above each message, and the end of a document behind each answer; its segments are tokenised one by one. What a
chat template writes is tokenised as a whole, as transformers does, and divided then, unless a token lies across two
segments: some tokenizers put a space in front of a text, and none belongs in front of an answer. Special tokens in it
are what they stand for; a message that holds the text of one cannot be told from the template's own, and is not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stretto.data.rows import Row, UnusableError, check_text
from stretto.data.tokenizer import Tokenizer
from stretto.errors import DataError
from stretto.files import read_text, write_text

COLUMNS = ("messages", "prompt", "completion")
_SETTINGS = "tokenizer_config.json"
_MOST_BYTES = 1 << 24  # of that file, or of a template
_MARK = re.compile(r"(\{%[-+]?\s*)(end)?generation(?=\s*[-+]?%\})")  # by which transformers finds answers
_PROBE = "(message)"  # to see what a template writes around it
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")  # templates write some of these


class Message(NamedTuple):
    role: str  # "system", "user", "assistant", or another one
    content: str


class Segment(NamedTuple):
    text: str
    is_answer: bool


def read_messages(row: Row) -> list[Message]:
    """Reads {"messages": [{"role", "content"}]} or {"prompt", "completion"}."""
    messages = row.get("messages")
    if messages is None:
        if row.get("prompt") is None or row.get("completion") is None:
            raise UnusableError('it has neither "messages" nor "prompt" and "completion"')
        parts = {"user": "prompt", "assistant": "completion"}
        return [Message(role, check_text(row[column], column)) for role, column in parts.items()]
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        raise UnusableError('"messages" is not a list of objects')
    found = [Message(*(check_text(one.get(key), key) for key in ("role", "content"))) for one in messages]
    if not any(message.role == "assistant" for message in found):
        raise UnusableError('no message has the role "assistant"')
    return found


@dataclass(frozen=True)
class Chat:
    template: str = ""  # in Jinja's language; empty: the plain form
    names: Mapping[str, str] = field(default_factory=dict)  # of special tokens: "eos_token" -> "<|im_end|>"

    def divide(self, messages: Sequence[Message]) -> list[Segment]:
        """Cuts a conversation behind each prompt and each answer, up to the last answer."""
        segments, done = list[Segment](), ""
        for i, message in enumerate(messages):
            if message.role == "assistant":
                asked, answered = self.render(messages[:i], asks=True), self.render(messages[: i + 1], asks=False)
                if not (asked.startswith(done) and answered.startswith(asked)):
                    raise UnusableError("the chat template writes what was said before differently when it goes on")
                segments += [Segment(asked[len(done) :], False), Segment(answered[len(asked) :], True)]
                done = answered
        return segments

    def render(self, messages: Sequence[Message], *, asks: bool) -> str:
        """Writes messages; `asks`: and what stands before an answer."""
        if not self.template:
            return "\n\n".join([*(f"{m.role}:\n{m.content}" for m in messages), *["assistant:\n"] * asks])
        given = {"messages": [message._asdict() for message in messages], "tools": None, "documents": None}
        try:
            return self._compiled.render(given, add_generation_prompt=asks, **self.names)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise UnusableError(f"the chat template cannot write it: {error}") from error

    @cached_property
    def _compiled(self) -> Any:
        """The template, which may be a stranger's: it reaches nothing but the messages."""
        extensions = ["jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _write_json
        plain = _MARK.sub(lambda mark: mark[1] + ("endif" if mark[2] else "if true"), self.template)
        try:
            return environment.from_string(plain)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template is not one of Jinja's: {error}") from error

    def check(self, messages: Sequence[Message], tokenizer: Tokenizer) -> None:
        """Raises an `UnusableError` for a message that could write special tokens of the template."""
        if self.template:
            for name in tokenizer.special_texts:
                if any(name in part for message in messages for part in message):
                    raise UnusableError(f"it holds the text of the special token {name!r}")

    def encode(self, conversations: Sequence[Sequence[Segment]], tokenizer: Tokenizer) -> list[list[list[int]]]:
        """Returns the ids of each segment of each conversation."""
        if self.template:
            return tokenizer.encode_marked([[segment.text for segment in segments] for segments in conversations])
        found = iter(tokenizer.encode_many([segment.text for segments in conversations for segment in segments]))
        bos, eos = [tokenizer.bos], [tokenizer.eos]
        return [
            [bos * (i == 0) + next(found) + eos * segment.is_answer for i, segment in enumerate(segments)]
            for segments in conversations
        ]

    def encode_prompt(self, prompt: str, tokenizer: Tokenizer) -> list[int]:
        """Returns the ids of what a user asks, up to where the answer begins."""
        message = Message("user", prompt)
        try:
            self.check([message], tokenizer)
            text = self.render([message], asks=True)
        except UnusableError as error:
            raise DataError(f"the prompt cannot be used: {error}") from error
        ((ids,),) = self.encode([[Segment(text, False)]], tokenizer)
        return ids

    def find_ends(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Returns the ids that end an answer: what the tokenizer calls its end, and the first special token that a
        template writes behind an answer, which may be another one."""
        if not self.template:
            return frozenset({tokenizer.eos})
        *_, answer = self.divide([Message("user", _PROBE), Message("assistant", _PROBE)])
        texts = self.names.get("eos_token", ""), answer.text.rpartition(_PROBE)[2]
        (named,), (behind,) = tokenizer.encode_marked([[text] for text in texts])
        ends = [*named[:1], *[id for id in behind if id in tokenizer.special_ids][:1]]
        return frozenset(ends or [tokenizer.eos])


def _refuse(message: str) -> None:
    raise UnusableError(f"the chat template cannot write it: {message}")


def _write_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def open_chat(tokenizer: str | Path) -> Chat:
    """Reads the chat template beside a tokenizer, if there is one."""
    path = Path(tokenizer)
    folder = path if path.is_dir() else path.parent
    try:
        settings = json.loads(read_text(folder / _SETTINGS, _MOST_BYTES)) if (folder / _SETTINGS).exists() else {}
        names = {key: _find_text(settings.get(key)) for key in _NAMED}
        alone = folder / "chat_template.jinja"
        template = read_text(alone, _MOST_BYTES) if alone.exists() else _find_template(settings.get("chat_template"))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, LookupError) as error:
        raise DataError(f"{folder} has settings of a tokenizer that cannot be read: {error}") from error
    return Chat(template, {key: name for key, name in names.items() if name})


def _find_text(token: Any) -> str:
    """A special token is its text, or an object with it."""
    return str(token["content"] if isinstance(token, dict) else token or "")


def _find_template(found: Any) -> str:
    """There may be several templates, with names."""
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}["default"]
    return str(found or "")


def keep_chat(chat: Chat, folder: Path) -> None:
    """Writes a template to where `open_chat` finds it, but never over another one, by which a model has learned."""
    if (folder / _SETTINGS).exists() and open_chat(folder) != chat:
        raise DataError(f"{folder}: data.tokenizer has another chat template now: choose another run.dir")
    if chat.template:
        write_text(folder / _SETTINGS, json.dumps({"chat_template": chat.template, **chat.names}))
