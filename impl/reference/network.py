"""The network: a tiny hybrid language model of transformers, and its forward without any cache.

The definition and the checkpoint are transformers' own (``Qwen3_5ForCausalLM``: gated delta rule with a short causal
convolution, full attention, dense MLPs), so that what ``save_pretrained`` writes loads wherever such a checkpoint does.
Every cache group of a configuration owns some of the layers. A window group's layers are full-attention layers whose
mask is narrowed: the checkpoint itself knows nothing of the window.

The forward without a cache is transformers' own as well, on its plain torch operators: what the paged forward, and
whatever kernels it runs on, is compared with.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvproof.spec.config import Config, GroupKind

VOCABULARY: Final = 512
_SPREAD: Final = 97  # odd, so that it has an inverse modulo the vocabulary
_OPERATORS: Final = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def vocabulary_row(token: Tensor, vocabulary: int = VOCABULARY) -> Tensor:
    """The embedding row of a token id of any size (int64, not negative).

    An id inside the vocabulary is its own row. Beyond it the quotient is mixed in, since scenarios number their tokens
    in blocks: with ``id % vocabulary`` alone, two prompts a multiple of the vocabulary apart would be the same to the
    model, and a cache that mixed them up would go unnoticed in the floats.
    """
    return (token + torch.div(token, vocabulary, rounding_mode="floor") * _SPREAD) % vocabulary


@dataclass(frozen=True)
class Layer:
    """One layer's cache: the ``place``-th of ``group``, which it shares a block with. ``window`` in tokens, or 0."""

    group: int
    place: int
    kind: GroupKind
    window: int


def layers_of(config: Config, each: int = 1) -> tuple[Layer, ...]:
    """``each`` layers for every group, in turns: recurrent groups first, then attention, as hybrids lay them out."""
    turn = sorted(enumerate(config.groups), key=lambda entry: entry[1].kind != "mamba")
    return tuple(Layer(index, place, group.kind, group.window) for place in range(each) for index, group in turn)


@functools.cache
def modeling() -> Any:
    """transformers' module with the network's classes.

    transformers takes fla's Triton kernels wherever they import, GPU or none, and then fails without one; importing
    them takes 5 s besides. So without a GPU they are kept out of its sight while it decides.
    """
    hide = not torch.cuda.is_available() and "fla" not in sys.modules
    if hide:
        sys.modules["fla"] = None  # type: ignore[assignment]  # the import system's own way to say: not there
    try:
        return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    finally:
        if hide:
            del sys.modules["fla"]


@functools.cache
def operator(name: str) -> Any:
    """One of transformers' torch operators itself, beneath the choice of a kernel that it is wrapped in."""
    return inspect.unwrap(getattr(modeling(), name))


@contextmanager
def _plain_operators() -> Iterator[None]:
    """Inside, transformers' layers run their torch operators, whichever kernels it chose when it was imported."""
    module = modeling()
    chosen = {name: getattr(module, name) for name in _OPERATORS}
    try:
        for name in _OPERATORS:
            setattr(module, name, operator(name))
        yield
    finally:
        for name, function in chosen.items():
            setattr(module, name, function)


def make_network(layers: Sequence[Layer], seed: int) -> Any:
    """A ``Qwen3_5ForCausalLM`` with one layer for each of ``layers``; fp32, on the CPU; its weights follow the seed."""
    configuration = importlib.import_module("transformers.models.qwen3_5.configuration_qwen3_5")
    settings = configuration.Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(layers),
        layer_types=["linear_attention" if layer.kind == "mamba" else "full_attention" for layer in layers],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # transformers draws its own weights first, from the global generator
        network = modeling().Qwen3_5ForCausalLM(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.copy_(_draw(name.split(".")[-2:], weight, generator))
    return network.eval()


def _draw(name: Sequence[str], weight: Tensor, generator: torch.Generator) -> Tensor:
    """Weights with which every cached number matters to the next token.

    transformers' own draw (0.02 everywhere) leaves the residual stream to the last token's embedding, forgets a
    recurrent state within a token or two, and spreads attention evenly. Here every layer adds about as much as the
    embedding does, a state decays by 1 to 13 % a token, and attention is peaked (scores with a deviation of about 4).
    """
    noise = torch.randn(weight.shape, generator=generator)
    match name:
        case [_, "A_log"]:
            return torch.log(0.01 + 0.09 * torch.rand(weight.shape, generator=generator))
        case [_, "dt_bias"]:
            return 1.0 + 0.1 * noise
        case ["conv1d", _]:
            return 0.5 * noise
        case ["embed_tokens", _]:
            return noise
        case ["q_norm" | "k_norm", _]:
            return 1.0 + 0.1 * noise  # zero-centred: a factor of about 2
        case ["norm", _] if weight.shape[0] == 16:
            return 1.0 + 0.1 * noise  # the gated norm's weight is the factor itself
        case [_, "weight"] if weight.dim() == 1:
            return 0.1 * noise
        case ["o_proj" | "out_proj" | "down_proj", _]:
            return 2.0 / math.sqrt(weight.shape[1]) * noise
        case _:
            return 1.0 / math.sqrt(weight.shape[1]) * noise


@dataclass(frozen=True)
class Recomputed:
    """One layer's cache after some tokens: an attention layer's keys and values, a recurrent one's state and window.

    ``first`` is the keys, (tokens, key-value heads, head), or the temporal state, (heads, key head, value head).
    ``second`` is the values, or the convolution's last inputs, (kernel - 1, channels), zeros before the first token.
    """

    first: Tensor
    second: Tensor


class Plain:
    """The network without any cache of ours: whole sequences in, one at a time."""

    def __init__(self, network: Any, layers: Sequence[Layer]) -> None:
        self.network = network
        self.layers = tuple(layers)
        for layer, module in zip(layers, network.model.layers, strict=True):
            if layer.kind == "window":
                module.register_forward_pre_hook(_narrowed(layer.window), with_kwargs=True)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The logits after every token: (tokens, vocabulary)."""
        logits: Tensor = self._run(tokens, use_cache=False).logits[0]
        return logits

    def caches(self, tokens: Sequence[int]) -> list[Recomputed]:
        """What every layer's cache holds after all the tokens, at least one."""
        cache = self._run(tokens, use_cache=True).past_key_values
        kernel = self.network.config.linear_conv_kernel_dim
        found = []
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            if layer.kind == "mamba":
                window = kept.conv_states[0][0, :, 1 - kernel :].T
                found.append(Recomputed(kept.recurrent_states[0][0], window))
            else:
                found.append(Recomputed(kept.keys[0].transpose(0, 1), kept.values[0].transpose(0, 1)))
        return found

    def _run(self, tokens: Sequence[int], use_cache: bool) -> Any:
        ids = vocabulary_row(torch.tensor([tokens]), self.network.config.vocab_size)
        # Left to find these out, transformers asks its cache for a length, which one of recurrent layers alone lacks.
        positions = torch.arange(len(tokens))[None]
        causal = {"full_attention": None, "linear_attention": None}
        with torch.no_grad(), _plain_operators():
            return self.network(ids, attention_mask=causal, position_ids=positions, use_cache=use_cache)


def _narrowed(window: int) -> Any:
    """A hook that gives a full-attention layer the mask of a sliding window: itself and the ``window`` - 1 before."""

    def narrow(
        module: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden: Tensor = arguments[0]
        at = torch.arange(hidden.shape[1])
        back = at[:, None] - at[None, :]
        return arguments, {**named, "attention_mask": ((back >= 0) & (back < window))[None, None]}

    return narrow
