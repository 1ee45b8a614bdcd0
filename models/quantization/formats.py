"""What the weights of a model are stored as, worked out from headers alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rimuru_kernels.packed_weights.format import PackedFormat


class LayerFormats(NamedTuple):
    """How the experts of one layer are quantised: gate and up alike, down perhaps otherwise."""

    gate_up: PackedFormat
    down: PackedFormat


@dataclass(frozen=True)
class WeightFormats:
    """How every weight of a model is stored.

    Attributes:
        experts: model layer -> formats of its routed experts, or None where they are plain numbers, or kept in so many ways that they are
            read as such; every sparse layer is there.
        dense: canonical name -> format, of the dense matrices that are quantised; the others are plain numbers.
        expert_dtype: safetensors name (F32, F16, BF16) of the experts of layers that are None, or what they are rounded to where they are
            kept in several ways; where there is none, `compute_dtype`.
        compute_dtype: safetensors name of the dtype of plain dense matrices.
        names: what people call a format, where `format_name` would not know.
        mixed: layers whose experts are quantised, but not all gates and ups in one way and all downs in one -> what the ways are called.
            No page holds that, so such experts become `expert_dtype`.
        others: canonical name -> what a dense matrix that is not in `dense` is stored as, where that is not `compute_dtype`.
    """

    experts: Mapping[int, LayerFormats | None]
    dense: Mapping[str, PackedFormat]
    expert_dtype: str
    compute_dtype: str
    names: Mapping[PackedFormat, str] = field(default_factory=dict)
    mixed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def computing(self) -> str:
        """Safetensors name of what a device computes with: the dtype of plain experts, which pages hold as they are, if there are any."""
        return self.expert_dtype if None in self.experts.values() else self.compute_dtype

    @property
    def quantised_experts(self) -> bool:
        """Whether the experts of any layer are quantised."""
        return any(formats is not None for formats in self.experts.values())
