"""A Megatron-core GPTModel from an Architecture, and its log-probs on packed sequences.

Call cpu.install() before importing this on a machine without CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from areal.workers.megatron.attention import PackedAttention, Packing, inverse_frequencies
from areal.workers.megatron.logprobs import logprobs_and_entropy
from areal.workers.models.architecture import Architecture


class RMSNorm(torch.nn.RMSNorm):
    """Replaces Megatron's wrapper, which supports neither sequence parallelism nor the dtype of the weights."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel


def build(architecture: Architecture, dtype: torch.dtype) -> GPTModel:
    """This rank's part of the model, on its device, with uninitialised weights. torch.distributed and Megatron's
    parallel_state must be initialised."""
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.ffn,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.norm_eps,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over data-parallel ranks, never averaged
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        tensor_model_parallel_size=tensor_parallel_size,
        # These need apex, Transformer Engine or a compiler.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=_spec(config),
        vocab_size=-(-architecture.vocab // tensor_parallel_size) * tensor_parallel_size,
        max_sequence_length=architecture.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="none",  # PackedAttention rotates
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model.cuda()


def _spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


class Scorer:
    """Log-probs of packed sequences under a model."""

    def __init__(self, model: torch.nn.Module, architecture: Architecture, dtype: torch.dtype) -> None:
        self._model, self._vocab, self._dtype = model, architecture.vocab, dtype
        self._frequencies = inverse_frequencies(architecture.rope, architecture.head_dim).cuda()

    def __call__(self, ids: Tensor, lengths: Sequence[int], temperature: float) -> tuple[Tensor, Tensor]:
        """Log-prob of each token given those before it in its sequence, and the entropy of that prediction, [T] each.

        ids: [T], concatenated sequences of `lengths`. Both results are 0 at the first token of a sequence.
        """
        packing = Packing.of(lengths, self._frequencies, self._dtype)
        logits = self._model(ids[None], None, None, packed_seq_params=packing)[0]
        logprobs, entropy = logprobs_and_entropy(
            logits,
            ids.roll(-1),
            temperature=temperature,
            vocab=self._vocab,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        predicted = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        predicted[packing.starts] = False
        zero = logprobs.new_zeros(())
        return torch.where(predicted, logprobs.roll(1), zero), torch.where(predicted, entropy.roll(1), zero)
