"""The network's weights as the paged forward uses them: projections of the same input joined into one matrix each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes that don't follow from the weights. ``kernel`` is the convolution's width, ``epsilon`` the norms'."""

    vocabulary: int
    heads: int
    kv_heads: int
    head: int
    key_heads: int
    value_heads: int
    key_head: int
    value_head: int
    kernel: int
    epsilon: float

    @property
    def keys_and_values(self) -> int:
        """Words a token takes in an attention layer: its keys, then its values."""
        return 2 * self.kv_heads * self.head

    @property
    def temporal(self) -> int:
        """Words of a recurrent layer's temporal state."""
        return self.value_heads * self.key_head * self.value_head

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_head + self.value_heads * self.value_head

    @property
    def window(self) -> int:
        """Words of a recurrent layer's convolution window: the inputs of the last ``kernel`` - 1 tokens."""
        return (self.kernel - 1) * self.channels


@dataclass(frozen=True)
class Attention:
    """``project`` gives queries and gates (head by head), keys, values. Norm weights here are factors."""

    project: Tensor
    query_norm: Tensor
    key_norm: Tensor
    out: Tensor


@dataclass(frozen=True)
class Recurrence:
    """``project`` gives the convolution's channels, the output gate, beta and the decay's logits.

    ``filters`` is (kernel, channels), the oldest input first. The log decay is -``rate`` · softplus(a + ``bias``).
    """

    project: Tensor
    filters: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    out: Tensor


@dataclass(frozen=True)
class Block:
    """A decoder layer: a mixer and a gated MLP (``up``: gate, then value), each behind its norm."""

    mixer: Attention | Recurrence
    mixer_norm: Tensor
    mlp_norm: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """Everything. ``frequencies`` are the rotary ones, radians a position; half of the rotated part of a head."""

    shape: Shape
    embedding: Tensor
    blocks: tuple[Block, ...]
    norm: Tensor
    head: Tensor
    frequencies: Tensor
    rotary_scale: float


def read_weights(network: Any) -> Weights:
    """The weights of a ``Qwen3_5ForCausalLM``, on its device."""
    settings, model = network.config, network.model
    shape = Shape(
        vocabulary=settings.vocab_size,
        heads=settings.num_attention_heads,
        kv_heads=settings.num_key_value_heads,
        head=settings.head_dim,
        key_heads=settings.linear_num_key_heads,
        value_heads=settings.linear_num_value_heads,
        key_head=settings.linear_key_head_dim,
        value_head=settings.linear_value_head_dim,
        kernel=settings.linear_conv_kernel_dim,
        epsilon=settings.rms_norm_eps,
    )
    with torch.no_grad():
        return Weights(
            shape=shape,
            embedding=model.embed_tokens.weight.detach(),
            blocks=tuple(_block(layer) for layer in model.layers),
            norm=_factor(model.norm),
            head=network.lm_head.weight.detach(),
            frequencies=model.rotary_emb.inv_freq.detach(),
            rotary_scale=model.rotary_emb.attention_scaling,
        )


def _block(layer: Any) -> Block:
    mixer = _recurrence(layer.linear_attn) if hasattr(layer, "linear_attn") else _attention(layer.self_attn)
    return Block(
        mixer=mixer,
        mixer_norm=_factor(layer.input_layernorm),
        mlp_norm=_factor(layer.post_attention_layernorm),
        up=_joined(layer.mlp.gate_proj, layer.mlp.up_proj),
        down=layer.mlp.down_proj.weight.detach(),
    )


def _attention(module: Any) -> Attention:
    return Attention(
        project=_joined(module.q_proj, module.k_proj, module.v_proj),
        query_norm=_factor(module.q_norm),
        key_norm=_factor(module.k_norm),
        out=module.o_proj.weight.detach(),
    )


def _recurrence(module: Any) -> Recurrence:
    return Recurrence(
        project=_joined(module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a),
        filters=module.conv1d.weight.detach()[:, 0].T.contiguous(),
        rate=module.A_log.detach().float().exp(),
        bias=module.dt_bias.detach(),
        norm=module.norm.weight.detach(),
        out=module.out_proj.weight.detach(),
    )


def _factor(norm: Any) -> Tensor:
    """The network's norms are centred on zero; the gated norm alone is not."""
    factor: Tensor = 1.0 + norm.weight.detach()
    return factor


def _joined(*projections: Any) -> Tensor:
    return torch.cat([projection.weight.detach() for projection in projections])
