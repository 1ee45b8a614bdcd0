"""The formats of quantised checkpoints that are read, one a row, and the door through which a quantization_config comes in. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rimuru_models.errors import CheckpointError
from rimuru_models.fields import Fields
from rimuru_models.headers import brief
from rimuru_models.quantization.awq import read_awq
from rimuru_models.quantization.compressed_tensors import read_compressed_tensors
from rimuru_models.quantization.fp4 import read_mxfp4
from rimuru_models.quantization.fp8 import read_fp8
from rimuru_models.quantization.gptq import read_gptq
from rimuru_models.quantization.modelopt import read_modelopt
from rimuru_models.quantization.scheme import Scheme


class Row(NamedTuple):
    """One format: how its quantization_config is read into the ways in which matrices may be kept, and what people call it."""

    read: Callable[[Fields], tuple[Scheme, ...]]
    words: str


FORMATS: dict[str, Row] = {
    "fp8": Row(read_fp8, "FP8 in blocks"),
    "gptq": Row(read_gptq, "GPTQ (4 and 8 bits, no act-order)"),
    "awq": Row(read_awq, "AWQ (4 bits)"),
    "compressed-tensors": Row(read_compressed_tensors, "compressed-tensors (int4, int8, FP8, NVFP4, MXFP4)"),
    "mxfp4": Row(read_mxfp4, "MXFP4"),
    "modelopt": Row(read_modelopt, "modelopt (NVFP4, FP8)"),
}

_LIST_FIELDS = ("modules_to_not_convert", "ignored_layers", "exclude_modules")
_MAX_LIST = 1 << 16


def supported() -> str:
    """All formats, in words."""
    return "; ".join(row.words for row in FORMATS.values())


@dataclass(frozen=True)
class Quantization:
    """A quantization_config that has been read.

    Attributes:
        method: its quant_method, a key of `FORMATS`.
        schemes: the ways in which it may keep a matrix; which one, the tensors show.
    """

    method: str
    schemes: tuple[Scheme, ...]

    @property
    def label(self) -> str:
        """What people call it, as far as the config alone tells: "int4", "NVFP4 and FP8"."""
        return " and ".join(dict.fromkeys(scheme.label for scheme in self.schemes)) or self.method


def read_quantization(fields: Fields) -> Quantization | None:
    """The `quantization_config` of a config.json (or of its text_config); None where there is none.

    Raises:
        CheckpointError: a format that is not supported, or a block that contradicts itself; says what is supported.
    """
    if fields.values.get("quantization_config") is None:
        return None
    inner = Fields(fields.mapping("quantization_config"), f"{fields.where}: quantization_config")
    method = inner.values.get("quant_method")
    try:
        if not isinstance(method, str) or method not in FORMATS:
            named = "the method is not named" if method is None else f"the method {brief(method)} is not supported"
            raise inner.error(f"the weights are quantised, and {named}.")
        for name in _LIST_FIELDS:
            if isinstance(inner.values.get(name), list):
                inner.list_of(name, str, _MAX_LIST)
        return Quantization(method, FORMATS[method].read(inner))
    except CheckpointError as error:  # whatever is wrong, another version of the model is the way out
        raise CheckpointError(error.what, hint=error.hint or f"Supported: {supported()}; or get the bfloat16 version.") from None
