"""Every format, one matrix at a time: what we make of its tensors is, bit for bit, what its own library makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantised import KINDS, Kind, mxfp4_blocks, same_bits
from safetensors.torch import save_file
from torch import Tensor

from rimuru_kernels.packed_weights import dequantize, page_bytes, unpack
from rimuru_models.fields import Fields
from rimuru_models.headers import read_header
from rimuru_models.index import CheckpointIndex, combine_headers
from rimuru_models.quantization.reading import map_parts, read_codes, read_floats, write_page
from rimuru_models.quantization.scheme import Parts
from rimuru_models.quantization.stored import Stored, find
from rimuru_models.quantization.table import read_quantization

SHAPES = [(48, 64), (8, 32), (56, 160), (1, 96), (130, 272), (3, 5), (2, 129), (64, 224)]


def scrambled(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same tensors with random content: every code, and scales of all sizes that are numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    # the oracle of GPTQ subtracts zero points in int8, which holds what 8-bit codes need only if those lie in the middle
    eight_bits = ".g_idx" in tensors and tensors[".qweight"].shape[0] * 4 >= len(tensors[".g_idx"])
    for suffix, tensor in tensors.items():
        if suffix in (".g_idx", ".weight_shape") or (suffix == ".qzeros" and eight_bits):
            found[suffix] = tensor
        elif tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            found[suffix] = (torch.rand(tensor.shape, generator=generator) * 0.1 + 1e-3).to(tensor.dtype)
        elif suffix.endswith(("scale", "scale_inv", "scales")):  # e4m3 and e8m0
            found[suffix] = torch.randint(90, 126, tensor.shape, generator=generator).to(torch.uint8).view(tensor.dtype)
        else:
            size = tensor.element_size()
            raw = torch.randint(0, 256, (*tensor.shape[:-1], tensor.shape[-1] * size), generator=generator).to(torch.uint8)
            found[suffix] = raw.view(tensor.dtype)
    return found


def stored_matrix(folder: Path, kind: Kind, tensors: dict[str, Tensor], rows: int, columns: int) -> tuple[Stored, Parts]:
    """The matrix `x`, found in a file as in any checkpoint; the oracle of MXFP4 blocks has all experts of a layer in one tensor."""
    experts = 1 if "_blocks" in tensors else None
    save_file(
        {f"x{suffix}": tensor[None] if experts else tensor.contiguous() for suffix, tensor in tensors.items()}, folder / "x.safetensors"
    )
    index: CheckpointIndex = combine_headers(folder, {"x.safetensors": read_header(folder / "x.safetensors")}, None)
    quantization = read_quantization(Fields({"quantization_config": kind.config}, "config.json"))
    assert quantization is not None
    found = find(index, quantization.schemes, "x", rows, columns, experts)
    assert found is not None
    assert set(found.names.values()) | set(found.extras) == set(index.tensors)
    stored = Stored(
        found.scheme, found.scheme.packed(rows, columns, found.dtypes), rows, columns, found.names, index=None if experts is None else 0
    )
    return stored, map_parts(stored, index, Path.read_bytes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*KINDS, "mxfp4-blocks"])
def test_bits_are_those_of_the_library(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    kind = mxfp4_blocks() if name == "mxfp4-blocks" else KINDS[name]
    # the nearest shape that the format, or its library, can have
    rows, columns = (-(-size // multiple) * multiple for size, multiple in zip(shape, kind.multiples, strict=True))
    rows = max(rows, kind.least_rows)
    tensors = kind.encode(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)))
    for content in (tensors, scrambled(tensors, columns)):
        stored, parts = stored_matrix(tmp_path, kind, content, rows, columns)
        for wide in (False, True):  # in the dtype of the scales, as their library decodes, and in float32
            expected = kind.decode({suffix: tensor.clone() for suffix, tensor in content.items()}, (rows, columns), wide)
            assert same_bits(read_floats(stored, parts), expected)
            assert not wide or expected.dtype in (torch.float32, torch.bfloat16 if name == "mxfp8" else torch.float32)
        packed = dequantize(read_codes(stored, parts), stored.fmt)
        # the factor of NVFP4 is applied last in a page, and first by the libraries
        assert torch.allclose(packed, read_floats(stored, parts), rtol=3e-7, atol=0, equal_nan=True)
        assert stored.fmt.factor or same_bits(packed, read_floats(stored, parts))


@pytest.mark.parametrize("name", KINDS)
def test_tiles_are_rows_of_the_whole(name: str, tmp_path: Path) -> None:
    kind, rows, columns = KINDS[name], 256, 160
    content = scrambled(kind.encode(torch.randn(rows, columns)), 5)
    stored, parts = stored_matrix(tmp_path, kind, content, rows, columns)
    whole = read_codes(stored, parts)
    for tiles in (2, 1):
        size = rows // tiles
        for tile in range(tiles):
            page = torch.full((page_bytes(stored.fmt, size, columns),), 255, dtype=torch.uint8)
            write_page(stored, parts, page, tile * size, (tile + 1) * size)
            codes = unpack(page, stored.fmt, size, columns)
            span = slice(tile * size, (tile + 1) * size)
            assert torch.equal(codes.values, whole.values[span])
            per = stored.fmt.group_rows
            assert torch.equal(codes.scales, whole.scales[span.start // per : -(-span.stop // per)])
            assert (codes.offsets is None) == (whole.offsets is None)
            if codes.offsets is not None and whole.offsets is not None:
                assert torch.equal(codes.offsets, whole.offsets[span])


def test_scales_beyond_float32_are_read_in_silence(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for name in ("nvfp4", "modelopt"):
        tensors = KINDS[name].encode(torch.randn(16, 32))
        for suffix in (".weight_global_scale", ".weight_scale_2"):
            if suffix in tensors:
                tensors[suffix] = torch.full_like(tensors[suffix], 1e-42 if name == "nvfp4" else 3e38)
        stored, parts = stored_matrix(tmp_path, KINDS[name], tensors, 16, 32)
        assert same_bits(read_floats(stored, parts), KINDS[name].decode(tensors, (16, 32), True))
        read_codes(stored, parts)
    assert not recwarn.list


def test_awq_without_zero_points_means_eight(tmp_path: Path) -> None:
    kind = KINDS["awq"]
    tensors = scrambled(kind.encode(torch.randn(32, 64)), 3)
    tensors[".qzeros"].fill_(int(torch.tensor(0x88888888).to(torch.int32)))
    expected = kind.decode(dict(tensors), (32, 64), True)
    del tensors[".qzeros"]
    symmetric = replace(kind, config=kind.config | {"zero_point": False})
    stored, parts = stored_matrix(tmp_path, symmetric, tensors, 32, 64)
    assert (stored.fmt.offset, stored.fmt.bias) == ("none", 8)
    assert same_bits(read_floats(stored, parts), expected)


def test_powers_of_two_may_be_bytes(tmp_path: Path) -> None:
    """DeepSeek writes them as F8_E8M0, others as U8."""
    kind = KINDS["fp8-e8m0"]
    tensors = scrambled(kind.encode(torch.randn(130, 200)), 4)
    expected = kind.decode(dict(tensors), (130, 200), True)
    tensors[".weight_scale_inv"] = tensors[".weight_scale_inv"].view(torch.uint8)
    stored, parts = stored_matrix(tmp_path, kind, tensors, 130, 200)
    assert same_bits(read_floats(stored, parts), expected)
