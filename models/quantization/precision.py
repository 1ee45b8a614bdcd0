"""What people call the ways in which weights are stored. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from rimuru_kernels.packed_weights.format import PackedFormat
from rimuru_models.config import ModelConfig
from rimuru_models.layout import dense_shapes
from rimuru_models.quantization.formats import WeightFormats

_NO_NAMES: Mapping[PackedFormat, str] = {}


class Precision(NamedTuple):
    """The precision of a model's routed experts and of its dense matrices, in words; the commonest first where there are several."""

    experts: str
    dense: str

    def words(self, kv: str | None = None) -> str:
        """All of it in one phrase; `kv`: that of the cache, if it is known."""
        if kv is None and self.experts == self.dense:
            return self.experts
        parts = [f"experts {self.experts}", f"dense {self.dense}"]
        return ", ".join([*parts, f"KV {kv}"] if kv else parts)


def format_name(fmt: PackedFormat, names: Mapping[PackedFormat, str] = _NO_NAMES) -> str:
    """What a format is called: "int4 (groups of 128)", "FP8 (blocks of 128)", "NVFP4", or as `names` has it."""
    if fmt in names:
        return names[fmt]
    if fmt.values == "fp4":
        return "NVFP4" if fmt.factor else "MXFP4"
    if fmt.values == "fp8" and fmt.scale == "e8m0" and fmt.group == 32 and fmt.group_rows == 1:
        return "MXFP8"
    kind = "FP8" if fmt.values == "fp8" else fmt.values
    if not fmt.group:
        return f"{kind} (whole rows)"
    if fmt.group_rows == 1:
        return f"{kind} (groups of {fmt.group})"
    return f"{kind} (blocks of {fmt.group if fmt.group == fmt.group_rows else f'{fmt.group_rows} x {fmt.group}'})"


def precision_of(config: ModelConfig, formats: WeightFormats) -> Precision:
    """Name what a model's weights are stored as. Vectors do not count: they are never quantised."""
    experts: Counter[str] = Counter()
    for layer in formats.experts.values():
        if layer is None:
            experts[formats.expert_dtype] += 3
        else:
            experts[format_name(layer.gate_up, formats.names)] += 2
            experts[format_name(layer.down, formats.names)] += 1
    dense: Counter[str] = Counter()
    for name, shape in dense_shapes(config).items():
        if len(shape) == 2 and shape[0] > 1:
            fmt = formats.dense.get(name)
            plain = formats.others.get(name, formats.compute_dtype)
            dense[plain if fmt is None else format_name(fmt, formats.names)] += math.prod(shape)
    return Precision(_listed(experts), _listed(dense))


def notices(formats: WeightFormats) -> tuple[str, ...]:
    """What a person should know of how these weights are used: sentences, most often none."""
    if not formats.mixed:
        return ()
    ways = " and ".join(sorted({way for ways in formats.mixed.values() for way in ways}))
    count = f"{len(formats.mixed)} of {len(formats.experts)} layers" if len(formats.experts) > 1 else "its layer"
    return (
        f"In {count} the experts are stored in several ways ({ways}), so they are held as {formats.expert_dtype}, which takes more memory.",
    )


def _listed(counted: Counter[str]) -> str:
    names = [name for name, _ in counted.most_common()]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
