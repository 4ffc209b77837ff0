"""A matrix product with fixed weights, packed once for the kernel that will read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight in its own blocked form (two times quicker at few rows)."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear:
    """x [rows, in] → [rows, out], in the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.is_packed = can_pack(weight)
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            self._product = torch.ops.mkldnn._linear_pointwise.default
        self._weight, self._bias = weight, bias
        self.has_bias = bias is not None

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_packed:
            return self._product(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)
