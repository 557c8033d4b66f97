"""Tiny hybrid models that vLLM builds from a ``config.json``, and weights with which every cached number matters.

vLLM's own random weights (within 0.001) leave the output to the last token alone: a check on such a model passes while
it tests nothing. Weights that are set after the engine is built change nothing either, where they are packed for the
kernels at load. So they are drawn by a loader, which vLLM calls in between.
"""

from __future__ import annotations

import importlib
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 512
POSITIONS: Final = 1024
LOAD_FORMAT: Final = "kvproof_random"


@dataclass(frozen=True)
class Model:
    """One model and how its runs are compared.

    ``together`` requests run at once; more than one only where batching leaves the arithmetic alone. ``from_outputs``
    lets a follow-up resume from a state that decode steps made: in bf16 that is another rounding of what prefill makes
    of the same tokens. The tolerances are the largest difference of a log-probability, and of a state relative to its
    largest number. ``needs`` are modules that the model's code imports and that not every build comes with.
    """

    name: str
    kind: str
    dtype: str
    together: int
    from_outputs: bool
    logprob_tolerance: float
    state_tolerance: float
    settings: Mapping[str, Any]
    needs: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """The model's folder as vLLM reads it: a configuration, no weights, no tokenizer."""
        settings = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "torch_dtype": self.dtype}
        (folder / "config.json").write_text(json.dumps({**settings, **self.settings}, indent=1), encoding="utf-8")


# The sizes are such that a recurrent state fits the page of 32 tokens of attention: vLLM widens the blocks otherwise.
# GDN on the CPU takes bf16 only, and heads of 64 or 128.
_GDN: Final[Mapping[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}

MODELS: Final = {
    model.name: model
    for model in (
        Model(
            name="granite",
            kind="Mamba2 + full, fp32",
            dtype="float32",
            together=4,
            from_outputs=True,
            logprob_tolerance=1e-4,
            state_tolerance=1e-4,
            settings={
                "architectures": ["GraniteMoeHybridForCausalLM"],
                "model_type": "granitemoehybrid",
                "hidden_size": 128,
                "intermediate_size": 256,
                "shared_intermediate_size": 256,
                "num_hidden_layers": 4,
                "layer_types": ["mamba"] * 3 + ["attention"],
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "mamba_n_heads": 8,
                "mamba_d_head": 32,
                "mamba_d_state": 16,
                "mamba_n_groups": 1,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "mamba_chunk_size": 32,
                "mamba_conv_bias": True,
                "mamba_proj_bias": False,
                "position_embedding_type": "rope",
                "rope_theta": 10_000.0,
                "embedding_multiplier": 1.0,
                "logits_scaling": 1.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": 0.18,
                "tie_word_embeddings": False,
            },
        ),
        Model(
            name="qwen3-next",
            kind="GDN + full, bf16",
            dtype="bfloat16",
            together=1,
            from_outputs=False,
            logprob_tolerance=1e-6,  # bit for bit: the same chunks through the same kernels
            state_tolerance=1e-6,
            settings={
                **_GDN,
                "architectures": ["Qwen3NextForCausalLM"],
                "model_type": "qwen3_next",
                "decoder_sparse_step": 4,  # vLLM's class expects at least one layer of experts
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
            },
        ),
        Model(
            name="qwen3.5",
            kind="GDN + full, bf16",
            dtype="bfloat16",
            together=1,
            from_outputs=False,
            logprob_tolerance=1e-6,  # bit for bit: the same chunks through the same kernels
            state_tolerance=1e-6,
            settings={**_GDN, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
            needs=("torchvision",),
        ),
    )
}


def register_loader() -> None:
    """Make ``load_format=LOAD_FORMAT`` known to the vLLM of this process."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    base: Any = importlib.import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader

    class RandomWeights(base):  # type: ignore[misc]  # vLLM is not typed here
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            draw_weights(model)

    loaders.register_model_loader(LOAD_FORMAT)(RandomWeights)


def draw_weights(model: Any, seed: int = 0) -> None:
    """Give every parameter its values: they follow the seed and the parameter's name, on any device."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            noise = torch.randn(weight.shape, generator=generator)
            even = torch.rand(weight.shape, generator=generator)
            weight.copy_(_values(name, weight.detach().float().cpu(), noise, even))


def _values(name: str, initial: Any, noise: Any, even: Any) -> Any:
    """A state decays by some percent a token, attention is peaked, every layer adds about as much as the embedding."""
    owner, last = ["", *name.split(".")][-2:]
    if last == "A_log":  # the logarithm of the decay's rate
        return (0.01 + 0.09 * even).log()
    if last == "A":  # the decay's rate, negative
        return -(0.01 + 0.09 * even)
    if last == "D":
        return 1.0 + 0.1 * noise
    if last == "dt_bias":
        return 1.0 + 0.1 * noise
    if owner == "conv1d":
        return (0.5 if last == "weight" else 0.1) * noise
    if owner == "embed_tokens":
        return noise
    if noise.dim() == 1:  # a norm: vLLM starts it at one, or at zero where that is its neutral weight
        return initial + 0.1 * noise
    scale = 1.0 / math.sqrt(noise.shape[-1])
    if owner in ("o_proj", "out_proj", "down_proj", "output_linear") or last == "w2_weight":
        return 2.0 * scale * noise
    return (3.0 if owner == "lm_head" else 1.0) * scale * noise
