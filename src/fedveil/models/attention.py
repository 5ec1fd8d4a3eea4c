"""torch's attention, written out in products where vmap is at work.

`nn.MultiheadAttention` uses its weights without calling a layer, and the fused operation inside of
it has no rule for vmap. A copy that a task runs computes the same in plain products; outside of
vmap, and where it is configured otherwise than here, torch's own code is used.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.models.products import Product, under_vmap


def plain_attention() -> AbstractContextManager[None]:
    """Inside of vmap, torch's attention is to be computed by operations that have a rule for it."""
    return sdpa_kernel(SDPBackend.MATH) if under_vmap() else nullcontext()


def attend_(module: nn.Module) -> nn.Module:
    """Give the attention layers of a module, which is a copy, their plain form; and return it.

    Subclasses, dropout and the options `add_bias_kv` and `add_zero_attn` stay as they are.

    >>> layer = attend_(nn.MultiheadAttention(4, 2))
    >>> x = torch.randn(3, 5, 1, 4)
    >>> torch.allclose(torch.vmap(layer)(x, x, x)[0][1], layer(x[1], x[1], x[1])[0], atol=1e-6)
    True
    """
    for layer in list(module.modules()):
        plain = type(layer) is nn.MultiheadAttention and not layer.dropout
        if plain and not layer.add_zero_attn and layer.bias_k is None:
            _write_out_(layer)
    return module


def _write_out_(layer: nn.MultiheadAttention) -> None:
    layer.__class__ = _Attention
    width = layer.embed_dim
    for number, part in enumerate("qkv"):
        rows = slice(number * width, (number + 1) * width)
        if layer._qkv_same_embed_dim:
            names, own = {"weight": "in_proj_weight"}, {"weight": rows, "bias": rows}
        else:
            names, own = {"weight": f"{part}_proj_weight"}, {"bias": rows}
        if layer.in_proj_bias is not None:
            names["bias"] = "in_proj_bias"
        inputs = getattr(layer, names["weight"]).shape[1]
        layer.add_module(f"product_{part}", Product(inputs, width, names, own))
    names = {name: f"out_proj.{name}" for name, _ in layer.out_proj.named_parameters()}
    layer.add_module("product_out", Product(width, width, names))


class _Attention(nn.MultiheadAttention):
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not under_vmap():
            given = (query, key, value, key_padding_mask, need_weights, attn_mask)
            return super().forward(*given, average_attn_weights, is_causal)
        single, first = query.ndim == 2, self.batch_first
        if single:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            self._heads(self._product(f"product_{part}", x))
            for part, x in zip("qkv", (query, key, value), strict=True)
        )
        scores = torch.matmul(q * self.head_dim**-0.5, k.mT)
        for mask in (self._mask(attn_mask), _padding(key_padding_mask)):
            if mask is not None:
                scores = scores + _additive(mask, scores)
        weights = scores.softmax(dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        out = self._product("product_out", mixed)
        out = out[0] if single else out if first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        seen = weights.mean(dim=1) if average_attn_weights else weights
        return out, seen[0] if single else seen

    def _product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        product: Product = getattr(self, name)
        return product.of(self, x)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[N, L, width] -> [N, heads, L, width of a head]."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """[L, S] for everybody, or [N x heads, L, S]."""
        if mask is None or mask.ndim == 2:
            return mask
        return mask.reshape(-1, self.num_heads, *mask.shape[1:])


def _padding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """[N, S] -> [N, 1, 1, S]."""
    return None if mask is None else mask[:, None, None, :]


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """True is not looked at; numbers are added to the scores."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.where(mask, float("-inf"), 0.0).to(like.dtype)
