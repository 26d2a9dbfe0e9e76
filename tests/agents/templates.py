"""Chat templates with the habits of common models, and tokenizers that carry them.

Written from the documented behaviour of the models, each habit that matters to a transcript and no more. Qwen3's is
in tests/models.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests import models

QWEN25 = """\
{%- set given = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' -%}
{{ '<|im_start|>system\\n' + given }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""A default system message, tool results inside one user turn. An empty answer would lose its line break."""

LLAMA3 = """\
{{- bos_token }}
{%- set given = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set messages = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: 1 Jan 2026\\n\\n' + given + '<|eot_id|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools %}
        {%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
    {%- endif %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
"""Tools inside the first user message, trimmed contents, no line break after a turn, one tool call a turn."""

THINKER = """\
{%- for message in messages %}
    {%- set content = message.content.split('</think>')[-1] if message.role == 'assistant' else message.content %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""
"""The generation prompt opens the thinking block; earlier thinking is dropped."""

PLAIN = """\
{%- for message in messages %}{{ message.role + ':' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}
"""
"""No special token anywhere."""

ALL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (models.QWEN3_TEMPLATE, {}),
    "qwen3-without-thinking": (models.QWEN3_TEMPLATE, {"enable_thinking": False}),
    "qwen2.5": (QWEN25, {}),
    "llama3": (LLAMA3, {}),
    "thinker": (THINKER, {}),
    "plain": (PLAIN, {}),
}
"""Name -> (template, its arguments)."""


def tokenizer(folder: Path, name: str) -> Any:
    """The tiny byte-level BPE tokenizer with the named template and the special tokens that this one needs."""
    models.write_tokenizer(folder, ALL[name][0])
    result = AutoTokenizer.from_pretrained(folder)
    if name == "llama3":
        special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        result.add_special_tokens(
            {"additional_special_tokens": special, "bos_token": special[0], "eos_token": special[3]}
        )
    return result
