"""The two kernels of the paged forward, and what each runs on.

``attend`` is torch's own scaled dot product on every device. ``recur`` is fla's Triton kernel on a GPU, where fla
imports, and transformers' torch operators otherwise. Nothing above this module knows the difference.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvproof.impl.reference.network import operator


@dataclass(frozen=True)
class Reads:
    """What a bundle of rows reads from the blocks, padded to the longest of them.

    ``block`` and ``offset``, (rows, positions), say where each position lies; what pads them is a position that the row
    reads anyway, since the words of any other may be nobody's. ``mask`` is (rows, 1, queries, positions). ``query``,
    (rows, queries), are indices into the step's tokens, padded with the row's last one: it is answered again, alike.
    """

    block: Tensor
    offset: Tensor
    mask: Tensor
    query: Tensor


def attend(query: Tensor, cache: Tensor, bundles: Sequence[Reads]) -> Tensor:
    """Attention of every token, (tokens, heads, head), over ``cache``, (blocks, positions, 2 · key-value heads · head).

    A position's words are its keys, then its values. The scale is the usual one, head ** -0.5.
    """
    out = torch.empty_like(query)
    for bundle in bundles:
        read = torch.unflatten(cache[bundle.block, bundle.offset], -1, (2, -1, query.shape[-1])).permute(2, 0, 3, 1, 4)
        out[bundle.query] = functional.scaled_dot_product_attention(
            query[bundle.query].transpose(1, 2), read[0], read[1], attn_mask=bundle.mask, enable_gqa=True
        ).transpose(1, 2)
    return out


def recur(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int], initial: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over segments that lie one after another, each from a state of its own.

    ``query`` and ``key`` are (tokens, heads, key head), not yet normalised; ``value`` is (tokens, heads, value head);
    ``decay`` (a logarithm, not above 0) and ``beta`` are (tokens, heads). ``lengths`` are the segments', none empty;
    ``initial`` is (segments, heads, key head, value head). Returns the outputs, as ``value``, and the final states.
    """
    fused = _fla() if value.is_cuda else None
    if fused is None:
        return _recur_torch(query, key, value, decay, beta, lengths, initial)
    # Not the chunked kernel: on fp32 its products are TF32, which is off by more than what there is to see here.
    # Written from fla-core 0.6.0's sources; not run, for want of a GPU.
    ends = torch.tensor([0, *lengths], device=value.device).cumsum(0)
    out, final = fused(
        q=query[None],
        k=key[None],
        v=value[None],
        g=decay[None],
        beta=beta[None],
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=ends,
    )
    return out[0], final


@functools.cache
def _fla() -> Any | None:
    """fla's fused kernel, or None where it isn't installed. It needs Triton, and Triton a GPU."""
    try:
        return importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    except ImportError:
        return None


def _recur_torch(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int], initial: Tensor
) -> tuple[Tensor, Tensor]:
    if max(lengths) == 1:
        out, final = _one_token(
            query[:, None], key[:, None], value[:, None], decay[:, None], beta[:, None], initial_state=initial
        )
        return out[:, 0], final
    out, final = torch.empty_like(value), torch.empty_like(initial)
    firsts = [0]
    for length in lengths:
        firsts.append(firsts[-1] + length)
    # Segments within a factor of two of each other go together, so that at most half of a bundle is padding.
    bundles: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        bundles.setdefault((length - 1).bit_length(), []).append(segment)
    for bits, segments in bundles.items():
        first = torch.tensor([firsts[s] for s in segments], device=value.device)[:, None]
        count = torch.tensor([lengths[s] for s in segments], device=value.device)[:, None]
        at = torch.arange(max(lengths[s] for s in segments), device=value.device)
        real = at < count
        index = first + torch.minimum(at, count - 1)
        # A token that neither decays the state nor writes to it leaves it as it was.
        still = ~real[..., None]
        mixed, states = (_one_token if bits == 0 else _many_tokens)(
            query[index],
            key[index],
            value[index],
            decay[index].masked_fill(still, 0.0),
            beta[index].masked_fill(still, 0.0),
            initial_state=initial[segments],
            **({} if bits == 0 else {"chunk_size": min(64, 1 << bits)}),
        )
        out[index[real]] = mixed[real]
        final[segments] = states
    return out, final


def _one_token(*tensors: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = operator("torch_recurrent_gated_delta_rule")(
        *tensors, initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return found


def _many_tokens(*tensors: Tensor, initial_state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = operator("torch_chunk_gated_delta_rule")(
        *tensors,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        chunk_size=chunk_size,
    )
    return found
