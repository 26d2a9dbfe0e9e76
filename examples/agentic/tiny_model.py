"""Builds a Qwen3 model with 0.1 M parameters and a word-level tokenizer, with which the search agent can train without
a GPU and without downloading a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

TAGS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
JSON = ['\n{"name": "', '", "arguments": {"query": "', '"}}\n']
"""The fixed parts of a tool call, each one token."""

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
        {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" }}
        {%- generation %}
        {{- message.content or "" }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{ "\\n" }}{% endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>" }}
        {%- endgeneration %}
        {{- "\\n" }}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""
"""Qwen3's format without thinking and without the list of tools."""


def build_tokenizer(names: Sequence[str], texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per name and per word of `texts`, and bytes for all other text.

    A name never includes a space, so that questions, queries and sentences share its token: "Ada lives in Rome." is
    split into "Ada", " lives", " in ", "Rome", ".". Decoding restores any text exactly.
    """
    literals = "|".join(re.escape(piece) for piece in JSON)
    pattern = rf"{literals}|[A-Z][a-z]+| ?[a-z]+(?: (?=[A-Z]))?|\s|[^\sA-Za-z]"
    words = ["\n", " ", "system", "user", "assistant", *JSON, *names, *texts]
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = pre_tokenizers.Sequence([split, to_bytes])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = dict.fromkeys(alphabet + [piece for word in words for piece, _ in pieces.pre_tokenize_str(word)])
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in TAGS])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in TOOL_TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def build_model(vocabulary: int, eos: int, pad: int, seed: int) -> Qwen3ForCausalLM:
    """Qwen3 with weights from N(0, 1/sqrt(fan_in)); with the usual 0.02, copying takes three times as long to learn."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # 16 is too small to distinguish all names
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
    return model


def build(folder: Path, names: Sequence[str], texts: Sequence[str], seed: int) -> PreTrainedTokenizerFast:
    """Write model and tokenizer into `folder`, in Hugging Face format. Returns the tokenizer."""
    logging.disable_progress_bar()
    tokenizer = build_tokenizer(names, texts)
    model = build_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
