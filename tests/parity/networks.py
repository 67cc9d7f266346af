"""Small networks of `transformers`, as the library makes them, without dropout."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY, WIDTH, POSITIONS = 23, 16, 16
_HIDDEN, _HEADS = 24, 2


def decoder(layers: int) -> dict[str, Any]:
    """Sizes as the configurations of decoders name them."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def in_float64(network: nn.Module) -> nn.Module:
    """Replace norms that round to float32, in backward too, where sums of gradients differ."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith(("RMSNorm", "T5LayerNorm")):
                setattr(module, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    return network


def gpt2(layers: int) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=WIDTH,
        n_layer=layers,
        n_head=_HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def bert(layers: int) -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        intermediate_size=_HIDDEN,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def llama(layers: int) -> nn.Module:
    return in_float64(LlamaForCausalLM(LlamaConfig(**decoder(layers))))


def mixtral(layers: int) -> nn.Module:
    config = MixtralConfig(
        **decoder(layers),
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
        experts_implementation="eager",
    )
    return in_float64(MixtralForCausalLM(config))


def t5(layers: int) -> nn.Module:
    """An encoder and a decoder of so many layers."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // _HEADS,
        d_ff=_HIDDEN,
        num_layers=layers,
        num_heads=_HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return in_float64(T5ForConditionalGeneration(config))
