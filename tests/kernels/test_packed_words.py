"""The machine code that makes numbers of packed words, run by hand: Triton's interpreter knows none, so no other test here sees it."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from rimuru_kernels.packed_weights import PackedFormat
from rimuru_kernels.packed_weights.words import machine_code

FORMATS = {
    "int4": PackedFormat("int4", 32, "f16", bias=8),
    "int4 with zeros": PackedFormat("int4", 128, "f16", "zero"),
    "int4 with offsets": PackedFormat("int4", 32, "u8*f16", "u8*f16"),
    "int5": PackedFormat("int5", 32, "f16", bias=16),
    "int6": PackedFormat("int6", 16, "i8*f16", bias=32),
    "int8": PackedFormat("int8", 32, "f16"),
    "int8 with zeros": PackedFormat("int8", 32, "f16", "zero"),
    "fp8": PackedFormat("fp8", 128, "f32", group_rows=128),
    "fp4": PackedFormat("fp4", 32, "e8m0"),
}
KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}
REST = {("fp8", "bf16"): 2.0**56, ("fp4", "bf16"): 2.0**62}  # what `triple` puts into scales
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pair(low: float, high: float, dtype: torch.dtype) -> int:
    bits = torch.tensor([low, high], dtype=torch.float64).to(dtype).view(torch.int16)
    return (int(bits[0]) & 0xFFFF) | (int(bits[1]) & 0xFFFF) << 16


def halves(register: int, dtype: torch.dtype) -> list[float]:
    bits = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16)
    return [float(value) for value in bits.view(dtype)]


def execute(code: str, arguments: list[int], results: int, dtype: torch.dtype) -> list[int]:
    """Runs straight PTX of the few instructions there are."""
    registers = {f"${results + place}": value for place, value in enumerate(arguments)}
    for line in re.sub(r"\.reg[^;]*;", "", code.strip("{} ")).split(";"):
        if not line.strip():
            continue
        operation, operands = line.strip().split(" ", 1)
        target, *names = (operand.strip() for operand in operands.split(","))
        values = [registers[name] if name in registers else int(name, 0) for name in names]
        name = operation.split(".")[0]
        if name == "mov":
            result = values[0]
        elif name in ("shl", "shr"):
            result = values[0] << values[1] if name == "shl" else values[0] >> values[1]
        elif name == "and":
            result = values[0] & values[1]
        elif name == "lop3":
            assert values[3] == 0xEA
            result = (values[0] & values[1]) | values[2]
        elif name == "prmt":
            together = (values[0] | values[1] << 32).to_bytes(8, "little")
            result = int.from_bytes(bytes(together[values[2] >> 4 * place & 7] for place in range(4)), "little")
        else:
            assert name == "fma"
            a, b, c = (halves(value, dtype) for value in values)
            result = pair(a[0] * b[0] + c[0], a[1] * b[1] + c[1], dtype)
        registers[target] = result & 0xFFFFFFFF
    return [registers[f"${place}"] for place in range(results)]


def code_of(fmt: PackedFormat, word: int, high: int, byte: int, half: int) -> float:
    """The number of one code, by the definition of the format."""
    low = word >> 8 * byte & 0xFF
    if fmt.values == "fp8":
        return float(torch.tensor([low], dtype=torch.uint8).view(torch.float8_e4m3fn))
    if fmt.values == "int8":
        return float(low - 256 if low > 127 else low)
    low = low >> 4 * half & 15
    if fmt.values == "fp4":
        return E2M1[low & 7] * (-1 if low & 8 else 1)
    bits = {"int4": 0, "int5": 1, "int6": 3}[fmt.values]
    return float(low | (high >> 8 * byte + 4 * half & bits) << 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_of_words(name: str, kind: str) -> None:
    fmt, dtype = FORMATS[name], KINDS[kind]
    generator = torch.Generator().manual_seed(3)
    count = 1 if fmt.values in ("int8", "fp8") else 2
    floats, code = fmt.values in ("fp8", "fp4"), machine_code(fmt, kind)
    for _ in range(60):
        words = torch.randint(0, 1 << 32, (2,), generator=generator).tolist()
        high = torch.randint(0, 1 << 32, (2,), generator=generator).tolist()
        if fmt.values == "fp8":
            words = [word & 0x7E7E7E7E | 0x80000080 for word in words]  # no NaN
        arguments, groups = [*words], []
        for _half in range(count):
            scale, off = (float(torch.rand(1, generator=generator).to(dtype)) for _ in range(2))
            less, off = (0.0, 0.0) if floats else (float(int(torch.randint(0, 16, (1,), generator=generator))), off)
            if name == "int8":
                less = 0.0
            before = 0.0 if floats else -less - (0 if fmt.values == "int8" else {"bf16": 128, "f16": 1024}[kind])
            stored = scale * REST.get((fmt.values, kind), 1.0)
            arguments += [pair(value, value, dtype) for value in (before, stored, off)]
            groups.append((less, scale, off))
        found = execute(code, [*arguments, *high], 4 * count, dtype)
        for half in range(count):
            less, scale, off = groups[half]
            for byte in range(4):
                expected = [(code_of(fmt, words[w], high[w], byte, half) - less) * scale + off for w in range(2)]
                assert found[4 * half + byte] == pair(*expected, dtype), (half, byte)
