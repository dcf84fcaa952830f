"""The drafter: a few Qwen3-style layers that attend to target features and to their own block.

Fused features C serve as extra keys and values of every layer. C skips queries, output projections and
MLPs and is never updated, so a sequence's context keys and values are computed once and shared by all of
its blocks. Source of the architecture: DFlash paper (arXiv 2602.06036), section 4.2 and appendix A.3.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ContextKV", "Drafter", "DrafterConfig", "config_for_target"]

ContextKV = list[tuple[Tensor, Tensor]]
"""A layer's context keys (rotated) and values, each [b, kv heads, S, head_dim]; one pair a layer."""


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a drafter. Raises ValueError for sizes that do not fit together.

    The drafter reads the target's embeddings and feeds its LM head, so `hidden_size` and `vocab_size` are
    the target's; heads and MLP may differ. RoPE is plain and one-dimensional over the full head width.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tap_layer_ids: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @property
    def num_taps(self) -> int:
        return len(self.tap_layer_ids)

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        for name in (*sizes, "vocab_size", "num_target_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"drafter: {self.num_heads} heads cannot share {self.num_kv_heads} kv heads")
        if self.head_dim % 2:
            raise ValueError(f"drafter: RoPE needs an even head_dim, got {self.head_dim}")
        if self.block_size < 2:
            raise ValueError(
                f"drafter: block_size must be 2 (anchor and draft) or more, got {self.block_size}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"drafter: mask_token_id {self.mask_token_id} is outside the target's vocabulary of "
                f"{self.vocab_size}; choose a reserved id that never occurs in the data"
            )
        ids = self.tap_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_target_layers:
            raise ValueError(
                f"drafter: tapped layers {list(ids)} must ascend within 0..{self.num_target_layers - 1}"
            )


def config_for_target(
    target: Any,
    *,
    num_layers: int,
    tap_layer_ids: tuple[int, ...],
    block_size: int,
    mask_token_id: int,
    intermediate_size: int | None = None,
) -> DrafterConfig:
    """A drafter's config with the geometry of `target`, a Hugging Face text config.

    Only the RoPE base is taken over: scaling, sections and partial rotation are not, because the drafter
    does not apply them.
    """
    heads = target.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        intermediate_size=intermediate_size or target.intermediate_size,
        vocab_size=target.vocab_size,
        tap_layer_ids=tap_layer_ids,
        num_target_layers=target.num_hidden_layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        rope_theta=float(rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10_000.0),
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        initializer_range=target.initializer_range,
        tie_word_embeddings=bool(target.tie_word_embeddings),
    )


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32, returned in the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Rotation:
    """RoPE of given positions: cosines and sines in float32, [b, 1, n, head_dim / 2].

    Computed from scratch, once a forward: a buffer would lose its precision with `model.to(bfloat16)`.
    """

    def __init__(self, positions: Tensor, head_dim: int, theta: float) -> None:
        steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
        angles = positions[:, None, :, None].float() * theta ** (-steps / head_dim)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x [b, heads, n, head_dim]; the halves of a head are the two coordinates (as in Qwen3)."""
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention whose keys and values are context features, then the block's own slots."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_heads // config.num_kv_heads
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys (normalised, rotated) and values of x [b, n, H]: each [b, kv heads, n, head_dim]."""
        return rotation(self.k_norm(self._heads(self.k_proj(x)))), self._heads(self.v_proj(x))

    def forward(
        self, x: Tensor, rotation: Rotation, context: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        q = rotation(self.q_norm(self._heads(self.q_proj(x))))
        own_k, own_v = self.keys_values(x, rotation)
        k = torch.cat([context[0].to(own_k.dtype), own_k], dim=2)
        v = torch.cat([context[1].to(own_v.dtype), own_v], dim=2)
        out = F.scaled_dot_product_attention(q, self._repeat(k), self._repeat(v), attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _repeat(self, x: Tensor) -> Tensor:
        # With a mask, fused kernels want as many key heads as query heads (`enable_gqa` would leave them).
        return x.repeat_interleave(self.groups, dim=1) if self.groups > 1 else x


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm layer. The context is not passed through its input norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rotation: Rotation, context: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trainable part of DFlash: fusion, layers, final norm. Embedding and LM head are the target's.

    Parameter names are those of published DFlash drafts. Works in any floating type, and under autocast.
    New weights are drawn from `generator` (or torch's global one): normal with `initializer_range`.
    """

    def __init__(self, config: DrafterConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range, generator=generator)

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Hidden states of N blocks a row, [b, N*B, H]: after the final norm, before the LM head.

        features [b, S, K*H]; block_embeddings [b, N*B, H] from the target's table; context_positions int64
        [b, S] (or [1, S]); block_positions int64 [b, N*B]; mask bool [b, 1, N*B, S + N*B], True = sees.
        """
        context = self.context_kv(features, context_positions)
        return self.draft(block_embeddings, block_positions, context, mask)

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """What every block reads of the context: keys and values of features [b, S, K*H], a layer a pair.

        Pairs of later positions may be appended along dimension 2; they never change.
        """
        if not torch.is_autocast_enabled(features.device.type):  # which converts them itself
            features = features.to(self.fc.weight.dtype)
        fused = self.hidden_norm(self.fc(features))
        rotation = self._rotation(positions)
        return [layer.self_attn.keys_values(fused, rotation) for layer in self._layers()]

    def draft(
        self,
        block_embeddings: Tensor,
        block_positions: Tensor,
        context: ContextKV,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [b, n, H] of block slots after a context from `context_kv`.

        Without a mask every slot sees the whole context and every slot: one block, as drafting does.
        """
        x = block_embeddings.to(self.fc.weight.dtype)
        rotation = self._rotation(block_positions)
        for layer, pair in zip(self._layers(), context, strict=True):
            x = layer(x, rotation, pair, mask)
        return self.norm(x)

    def _rotation(self, positions: Tensor) -> Rotation:
        return Rotation(positions, self.config.head_dim, self.config.rope_theta)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]
