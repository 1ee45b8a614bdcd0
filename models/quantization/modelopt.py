"""The quantization_config of NVIDIA's modelopt. `quant_method: modelopt`: NVFP4, FP8, or both by module, which the tensors show."""

from __future__ import annotations

from rimuru_models.fields import Fields
from rimuru_models.quantization.fp4 import Nvfp4
from rimuru_models.quantization.fp8 import Float8
from rimuru_models.quantization.scheme import Scheme

_NVFP4 = (Nvfp4("modelopt"),)
_FP8 = (Float8(1, 0, ".weight_scale"),)
_ALGORITHMS: dict[str, tuple[Scheme, ...]] = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "FP8": _FP8,
    "MIXED_PRECISION": _NVFP4 + _FP8,
}


def read_modelopt(fields: Fields) -> tuple[Scheme, ...]:
    """What its algorithm stores.

    Raises:
        CheckpointError: an algorithm that is not supported.
    """
    name = fields.text("quant_algo")
    if name.upper() not in _ALGORITHMS:
        raise fields.error(f"quant_algo {name[:40]!r} is not supported; {', '.join(_ALGORITHMS)} are.")
    return _ALGORITHMS[name.upper()]
