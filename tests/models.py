"""Tiny models in Hugging Face format, the same on every machine for the same seed.

    folder = build(tmp_path / "qwen3", "qwen3")

Two layers, hidden size 64, grouped-query attention (4 heads, 2 key-value heads), float32. Weights are wide
(`initializer_range` 0.25), so that logits are far from uniform and a weight update shows in every log-prob.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

Family = Literal["qwen2", "qwen3", "llama"]

VOCAB_SIZE = 512
"""Rows of the embedding; the tokenizer uses fewer, as real models do."""
CONTEXT_LENGTH = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that decoding keeps even with skip_special_tokens, as in Qwen3."""
_WORDS = """
the and in of to is a city country person where does live search answer name arguments query result assistant user
system tool function parameters string Paris France
"""

CHATML_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
        {{- '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Plain ChatML: the render of a conversation is a prefix of the render of a longer one."""

QWEN3_TEMPLATE = """\
{%- set ns = namespace(query=messages | length - 1) %}
{%- for message in messages %}
    {%- set told = message.content if message.content is string else '' %}
    {%- if message.role == 'user' and not told.startswith('<tool_response>') %}
        {%- set ns.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- set given = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or given %}
    {{- '<|im_start|>system\\n' + given + ('\\n\\n' if tools and given else '') }}
    {%- if tools %}
        {{- '# Tools\\n\\nEach is called by a JSON object inside <tool_call></tool_call>.\\n<tools>' }}
        {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {%- set within = content.split('</think>')[0].split('<think>')[-1] if '</think>' in content else '' %}
        {%- set thought = (message.reasoning_content or within).strip('\\n') %}
        {%- set answer = content.split('</think>')[-1].lstrip('\\n') if within else content %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- answer }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if answer or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
"""With the habits of Qwen3's: it strips earlier thinking, and may put an empty thinking block into the prompt."""


def build(
    folder: Path | str,
    family: Family = "qwen3",
    *,
    tied: bool = True,
    seed: int = 0,
    template: str = QWEN3_TEMPLATE,
    hidden_size: int = 64,
    layers: int = 2,
) -> Path:
    """Write a model of the family with random weights and its tokenizer; returns the folder."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    classes = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    extra = {"layer_types": ["full_attention"] * layers} if family != "llama" else {}
    config = classes[family](
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.25,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        dtype="float32",
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Constructors leave biases 0 and norms 1, which would hide an error in their conversion.
                if name.endswith("bias"):
                    parameter.normal_(std=0.25)
                elif "norm" in name:
                    parameter.normal_(mean=1.0, std=0.1)
    model.save_pretrained(folder)
    write_tokenizer(folder, template)
    return Path(folder)


def write_tokenizer(folder: Path | str, template: str = QWEN3_TEMPLATE) -> None:
    """Write a lossless byte-level BPE tokenizer. A text has many token sequences that decode to it, so that a test
    notices when sampled text is tokenised again (I5)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    first = [*SPECIAL_TOKENS, *TAGS]
    vocabulary = {token: id for id, token in enumerate([*first, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges: dict[tuple[str, str], None] = {}
    for bare in _WORDS.split():
        for word in (bare, "\u0120" + bare):  # U+0120 is the byte-level form of a space
            for end in range(1, len(word)):
                merges.setdefault((word[:end], word[end]))
                vocabulary.setdefault(word[: end + 1], len(vocabulary))
    assert len(vocabulary) <= VOCAB_SIZE, len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    fast.save_pretrained(folder)


def vocabulary(folder: Path | str) -> dict[str, int]:
    """Token -> id of a model folder."""
    return json.loads((Path(folder) / "tokenizer.json").read_text())["model"]["vocab"]
