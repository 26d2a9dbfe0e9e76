"""The chat template of a model, shared by all episodes: messages -> text -> token ids, and ids -> message.

A conversation is rendered as a whole only at its start. What follows a sampled message is the difference of two renders
around a stand-in assistant message, so a sampled message itself is never rendered or tokenised again (I5):

    template([user, stand-in])                  = head  STAND-IN closing
    template([user, stand-in, *new messages])   = head' STAND-IN closing new messages, generation prompt

`head` and `head'` may differ (Qwen3 adds and strips thinking blocks there) and are not used. `closing` is the end of a
turn, such as "<|im_end|>\\n", whose first token the model itself samples.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal.errors import ConfigError, ForkRefused
from areal.types import Ints, Message

_STAND_IN = "stand5in7for4a6sampled9message"
_USER: Message = {"role": "user", "content": "."}
_LONG_TEXT = 2_000  # characters; longer texts take over a millisecond to tokenise, which is done in a thread
_LONG_IDS = 4_000  # tokens; the same for decoding
_CACHED_PROMPTS = 64  # the members of a group share their first prompt


class Template:
    """`tokenizer` is a Hugging Face tokenizer with a chat template; `args` are extra arguments of that template.

    Raises ConfigError if there is no chat template, or it omits the content of assistant messages.
    """

    def __init__(self, tokenizer: Any, args: dict[str, Any] | None = None) -> None:
        source = str(getattr(tokenizer, "chat_template", None) or "")
        if not source:
            raise ConfigError(
                "the tokenizer has no chat template: add `chat_template` to its tokenizer_config.json, or write agents "
                "with episode.generate(input_ids)"
            )
        for key in args or {}:
            if not re.search(rf"\b{re.escape(key)}\b", source):
                raise ConfigError(f"model.template_args: the chat template does not use {key!r}")
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._args = dict(args or {})
        self._cache: OrderedDict[str, Ints] = OrderedDict()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        try:
            closing = self._after_stand_in([], None, generation=False)
            opening = self._after_stand_in([], None, generation=True)[len(closing) :]
        except ForkRefused as error:
            raise ConfigError(str(error)) from error
        closing_ids = self._encode(closing).tolist()
        # The model itself samples the closing up to its first special token.
        end = next((at for at, id in enumerate(closing_ids) if id in self.special_ids), None)
        self._sampled_closing = closing_ids[: end + 1] if end is not None else []
        self._opens_thinking = opening.rstrip().endswith("<think>")

    async def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> Ints:
        """Token ids [P] of a whole conversation and the generation prompt. Raises ForkRefused."""
        text = self._render(messages, tools, generation=True)
        ids = self._cache.pop(text, None)
        if ids is None:
            ids = await self._ids(text)
        self._cache[text] = ids
        if len(self._cache) > _CACHED_PROMPTS:
            self._cache.popitem(last=False)
        return ids

    async def extend(self, last: int, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> Ints:
        """Token ids [P] that follow a sampled message: the end of its turn, `messages`, the generation prompt.

        last: the last sampled id, or -1; an end of turn that the model sampled is not repeated. Raises ForkRefused.
        """
        ids = await self._ids(self._after_stand_in(messages, tools, generation=True))
        ended = self._sampled_closing and self._sampled_closing[-1] == last
        return ids[len(self._sampled_closing) :] if ended else ids

    async def text(self, ids: Ints) -> str:
        """Decode sampled ids. Invalid UTF-8 becomes U+FFFD."""
        return self._decode(ids) if len(ids) < _LONG_IDS else await asyncio.to_thread(self._decode, ids)

    def split_thinking(self, text: str) -> tuple[str | None, str]:
        """(reasoning, content) of a sampled text; reasoning is None if the model did not think."""
        head, tag, tail = text.partition("<think>")
        if tag and not head.strip():
            text = tail
        elif not self._opens_thinking and (tag or "</think>" not in text):
            return None, text
        reasoning, _, content = text.partition("</think>")
        return reasoning.strip("\n"), content.lstrip("\n")

    async def _ids(self, text: str) -> Ints:
        return self._encode(text) if len(text) < _LONG_TEXT else await asyncio.to_thread(self._encode, text)

    def _encode(self, text: str) -> Ints:
        if self._backend is not None:  # the Rust tokenizer: thread-safe, and without a Python loop over the ids
            ids = self._backend.encode(text, add_special_tokens=False).ids
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        array = np.array(ids, dtype=np.int32)
        array.flags.writeable = False  # shared between episodes
        return array

    def _decode(self, ids: Ints) -> str:
        if self._backend is not None:
            return self._backend.decode(ids.tolist(), skip_special_tokens=False)
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, generation: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=generation,
                **self._args,
            )
        except Exception as error:  # templates are programs and may raise anything
            raise ForkRefused(
                f"the chat template cannot render {_outline(messages)}: {type(error).__name__}: {error}"
            ) from error

    def _after_stand_in(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, generation: bool
    ) -> str:
        stand_in = {"role": "assistant", "content": _STAND_IN}
        _, found, after = self._render([_USER, stand_in, *messages], tools, generation).partition(_STAND_IN)
        if not found:
            raise ForkRefused(
                f"the chat template omits an assistant's content before {_outline(messages)}, so the tokens of earlier "
                "turns cannot be continued"
            )
        return after


def _outline(messages: Sequence[Message]) -> str:
    roles = ", ".join(str(message.get("role")) for message in messages[-4:]) or "no message"
    return f"messages [{'..., ' if len(messages) > 4 else ''}{roles}]"


def _for_template(message: Message) -> Message:
    """Turn arguments of tool calls into objects, which all templates can render, and malformed calls back into text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    content, good = message.get("content") or "", []
    for call in calls:
        arguments = call["function"]["arguments"]
        if "error" in call:
            content += f"\n<tool_call>{arguments}</tool_call>"
        else:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
            good.append({**call, "function": {**call["function"], "arguments": parsed}})
    plain = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content.lstrip("\n")}
    return plain | {"tool_calls": good} if good else plain  # no empty list: some templates only check for the key
