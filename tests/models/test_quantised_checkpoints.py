"""Whole quantised checkpoints: our logits are those of transformers over the weights that each format's own library makes of the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import KINDS, foreign_imports, fp8, mxfp4_blocks, pack, write_quantised_checkpoint
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES, HYBRIDS

from rimuru_kernels.packed_weights import dequantize, page_bytes, tile_rows, unpack
from rimuru_models.layout import dense_shapes
from rimuru_models.weights import CheckpointReader

TOKENS = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(3))
TOLERANCE = 1e-4

# test_quantised_matrices has every format; here each kind of part once, and every family's names
OF_ONE_FAMILY = ("fp8-e8m0", "gptq", "awq", "int4-channel-asymmetric", "int8", "int8-packed", "fp8-tensor", "nvfp4", "mxfp4", "modelopt")
OF_EACH_FAMILY = ("fp8-bf16", "int4-asymmetric")
CASES = [("qwen3_moe", name) for name in OF_ONE_FAMILY] + [(family, name) for family in (*FAMILIES, *HYBRIDS) for name in OF_EACH_FAMILY]
SIZES: dict[str, Any] = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64}


def sizes(family: str) -> dict[str, Any]:
    """Widths that every format's library takes; more than one group along each."""
    return {"intermediate_size": 96} if family in ("mixtral", "olmoe", "granitemoehybrid") else SIZES


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS[None]).logits[0]
    return found


@pytest.mark.parametrize(("family", "name"), CASES, ids=lambda value: value)
def test_logits(family: str, name: str, tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any) -> None:
    layers = 4 if family in HYBRIDS else 2
    quantised, plain = write_quantised_checkpoint(tmp_path, family, KINDS[name], seed=4, num_layers=layers, **sizes(family))
    with CheckpointReader(quantised) as reader:
        # Granite's experts are published in one tensor a layer only, and the writer quantises matrices
        assert all((formats is None) == (family == "granitemoehybrid") for formats in reader.formats.experts.values())
        assert any(".self_attn." in name for name in reader.formats.dense)
    expected = logits_of(reference_model(plain))
    actual = resident_run(quantised).run(TOKENS, [17, 1, 6])
    assert expected.std() > 0.5
    assert (actual - expected).abs().max() < TOLERANCE


@pytest.mark.filterwarnings("ignore:You passed")
@pytest.mark.parametrize("bits", [4, 8])
def test_what_transformers_reads_from_the_same_files(bits: int, tmp_path: Path, transformers_module: Any, resident_run: Any) -> None:
    """No code of ours between file and reference: transformers takes config and tensors to compressed-tensors itself."""
    kind = pack(bits, 32, True, torch.float32)  # it decodes in the precision of the scales
    quantised, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", kind, num_layers=2, **SIZES)
    with foreign_imports():
        model = transformers_module.AutoModelForCausalLM.from_pretrained(
            quantised,
            dtype=torch.float32,
            attn_implementation="eager",
            quantization_config=transformers_module.CompressedTensorsConfig(dequantize=True),
        )
    assert (resident_run(quantised).run(TOKENS, [24]) - logits_of(model.eval())).abs().max() < TOLERANCE


def test_a_quantised_router(tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any) -> None:
    quantised, plain = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS["gptq"], router=True, num_layers=1, **SIZES)
    with CheckpointReader(quantised) as reader:
        assert "model.layers.0.mlp.gate.weight" in reader.formats.dense
        assert reader.dense_view("model.layers.0.mlp.gate.weight").dtype is torch.float32
    assert (resident_run(quantised).run(TOKENS, [24]) - logits_of(reference_model(plain))).abs().max() < TOLERANCE


def test_fused_blocks_of_mxfp4(tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any) -> None:
    quantised, plain = write_quantised_checkpoint(tmp_path, "qwen3_moe", mxfp4_blocks(), keep=lambda name: ".experts." not in name, **SIZES)
    tensors = load_file(quantised / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        for suffix in ("_blocks", "_scales"):
            gate_up, down = [], []
            for expert in range(8):
                gate, up, last = (tensors.pop(f"{prefix}.{expert}.{part}_proj{suffix}") for part in ("gate", "up", "down"))
                gate_up.append(torch.cat([gate, up]))
                down.append(last)
            tensors |= {f"{prefix}.gate_up_proj{suffix}": torch.stack(gate_up), f"{prefix}.down_proj{suffix}": torch.stack(down)}
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    assert (resident_run(quantised).run(TOKENS, [24]) - logits_of(reference_model(plain))).abs().max() < TOLERANCE


@pytest.mark.parametrize("width", [128, 64], ids=["aligned", "a block holds rows of gate and of up"])
@pytest.mark.parametrize("suffix", ["", ".weight"], ids=["short names", "with .weight"])
def test_fused_fp8(suffix: str, width: int, tmp_path: Path) -> None:
    quantised, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", fp8(torch.bfloat16), moe_intermediate_size=width)
    with CheckpointReader(quantised) as reader:
        config = reader.config
    tensors = load_file(quantised / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    kind = fp8(torch.bfloat16)
    expected = {}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
        for name, shape in (("gate_up_proj", (2 * width, config.hidden_size)), ("down_proj", (config.hidden_size, width))):
            encoded = [kind.encode(torch.randn(*shape, generator=generator)) for _ in range(config.num_experts)]
            expected[layer, name] = [kind.decode(parts, shape, True) for parts in encoded]
            tensors[f"{prefix}.{name}{suffix}"] = torch.stack([parts[".weight"] for parts in encoded])
            tensors[f"{prefix}.{name}{suffix}_scale_inv"] = torch.stack([parts[".weight_scale_inv"] for parts in encoded])
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with CheckpointReader(quantised) as reader:
        for layer in range(config.num_layers):
            for expert in range(config.num_experts):
                gate, up, down = reader.expert(layer, expert)
                assert torch.equal(torch.cat([gate, up]), expected[layer, "gate_up_proj"][expert])
                assert torch.equal(down, expected[layer, "down_proj"][expert])
        formats = reader.formats.experts[0]
        assert formats is not None
        assert (formats.gate_up.group_rows, formats.down.group_rows) == (128 if width == 128 else 1, 128)


def test_layers_of_different_formats(tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any) -> None:
    """Layer 0 plain, layer 1 int4 with int8 down, layer 2 int8, layer 3 int4 in which one matrix is plain."""
    kinds = {"int4": pack(4, 32), "int8": pack(8, 32, False)}

    def kind_of(name: str) -> str | None:
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") and ".experts." in name else None
        if layer in (None, 0) or name == "model.layers.3.mlp.experts.2.up_proj.weight":
            return None
        return "int8" if layer == 2 or (layer == 1 and "down_proj" in name) else "int4"

    folders = {
        key: write_quantised_checkpoint(tmp_path / key, "qwen3_moe", kind, keep=lambda name, key=key: kind_of(name) != key, **SIZES)
        for key, kind in kinds.items()
    }
    mixed, plain = (
        {name: tensor for key in kinds for name, tensor in load_file(folders[key][place] / "model.safetensors").items()} for place in (0, 1)
    )
    first = load_file(folders["int4"][1] / "model.safetensors")
    for name in list(plain):  # a matrix belongs to the checkpoint that quantised it
        plain[name] = first[name] if kind_of(name) == "int4" else plain[name]
        if name in mixed and kind_of(name) is not None:
            del mixed[name]
    config = json.loads((folders["int4"][0] / "config.json").read_text("utf-8"))
    other = json.loads((folders["int8"][0] / "config.json").read_text("utf-8"))
    config["quantization_config"]["config_groups"]["group_1"] = other["quantization_config"]["config_groups"]["group_0"]
    target, reference = folders["int4"][0], folders["int4"][1]
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(mixed, target / "model.safetensors", {"format": "pt"})
    save_file(plain, reference / "model.safetensors", {"format": "pt"})
    with CheckpointReader(target) as reader:
        formats = reader.formats.experts
        assert formats[0] is None and formats[3] is None
        assert [(both.gate_up.values, both.down.values) for both in (formats[1], formats[2]) if both] == [
            ("int4", "int8"),
            ("int8", "int8"),
        ]
        assert reader.expert_extents(0, 0) is not None and reader.expert_extents(1, 0) is None and reader.expert_extents(3, 2) is None
        assert reader.expert_dtype is torch.float32
    assert (resident_run(target).run(TOKENS, [24]) - logits_of(reference_model(reference))).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["fp8-f32", "gptq", "awq", "int4-asymmetric", "int8", "nvfp4"])
def test_three_ways_to_read_an_expert_agree(name: str, tmp_path: Path) -> None:
    quantised, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS[name], moe_intermediate_size=128)
    with CheckpointReader(quantised) as reader:
        for layer, formats in reader.formats.experts.items():
            assert formats is not None
            kinds = (formats.gate_up, formats.gate_up, formats.down)
            floats, codes = reader.expert(layer, 5), reader.expert_codes(layer, 5)
            for tiles in (1, 2):
                if kinds[0].group_rows > 1 and tiles > 1:
                    continue  # a tile begins where a block of rows does
                shapes = [(whole.shape[0] // tiles, whole.shape[1]) for whole in floats for _ in range(tiles)]
                wide = [fmt for fmt in kinds for _ in range(tiles)]
                pages = [torch.zeros(page_bytes(fmt, *shape), dtype=torch.uint8) for fmt, shape in zip(wide, shapes, strict=True)]
                reader.expert_packed(layer, 5, pages)
                for place in range(3):
                    span = range(place * tiles, (place + 1) * tiles)
                    read = torch.cat([dequantize(unpack(pages[tile], wide[tile], *shapes[tile]), wide[tile]) for tile in span])
                    assert torch.equal(read, dequantize(codes[place], kinds[place]))
                    assert torch.allclose(read, floats[place], rtol=3e-7, atol=0)
            with pytest.raises(ValueError, match="4 pages"):
                reader.expert_packed(layer, 5, [torch.zeros(1, dtype=torch.uint8)] * 4)
        for canonical, shape in dense_shapes(reader.config).items():
            found = reader.dense_codes(canonical)
            assert (found is not None) == (canonical in reader.formats.dense)
            if found is not None:
                assert found[1] == reader.formats.dense[canonical]
                assert found[0].values.shape == shape
                assert torch.allclose(dequantize(*found), reader.dense_view(canonical), rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", ["fp8-f32", "gptq", "int4-asymmetric", "nvfp4"])
def test_row_tiles_of_different_numbers(name: str, tmp_path: Path) -> None:
    """The last tile of a projection has fewer rows, at the places of a whole tile's first ones; rows that share a scale stay together."""
    quantised, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS[name], moe_intermediate_size=384, hidden_size=320)
    with CheckpointReader(quantised) as reader:
        formats = reader.formats.experts[0]
        assert formats is not None
        kinds = (formats.gate_up, formats.gate_up, formats.down)
        codes = reader.expert_codes(0, 5)
        shapes = [tuple(own.values.shape) for own in codes]
        heights = [tile_rows(rows, count, fmt.group_rows) for (rows, _), count, fmt in zip(shapes, (2, 2, 3), kinds, strict=True)]
        assert heights == ([256, 256, 128] if formats.gate_up.group_rows > 1 else [192, 192, 128])
        pages = [
            torch.zeros(page_bytes(fmt, rows, columns), dtype=torch.uint8)
            for fmt, rows, (_, columns), count in zip(kinds, heights, shapes, (2, 2, 3), strict=True)
            for _ in range(count)
        ]
        reader.expert_packed(0, 5, pages, (2, 3))
        for own, fmt, rows, whole, (_, columns) in zip((pages[:2], pages[2:4], pages[4:]), kinds, heights, codes, shapes, strict=True):
            read = torch.cat([dequantize(unpack(page, fmt, rows, columns), fmt) for page in own])
            assert torch.equal(read[: len(whole.values)], dequantize(whole, fmt))


def test_what_a_device_computes_with_is_the_dtype_of_plain_weights(tmp_path: Path) -> None:
    quantised, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS["awq"], **SIZES)
    tensors = load_file(quantised / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].half()
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with CheckpointReader(quantised) as reader:
        assert (reader.compute_dtype, reader.expert_dtype) == (torch.float16, torch.float16)


def test_a_layer_kept_in_several_ways_has_the_dtype_of_plain_experts(tmp_path: Path) -> None:
    one = "model.layers.1.mlp.experts.2.down_proj.weight"
    quantised, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", pack(4, 32), num_layers=2, keep=lambda name: name == one, **SIZES)
    with CheckpointReader(quantised) as reader:
        exact = reader.expert(1, 2)
    tensors = load_file(quantised / "model.safetensors")
    plain = {name: tensor.bfloat16() if tensor.dtype is torch.float32 else tensor for name, tensor in tensors.items()}
    save_file(plain, quantised / "model.safetensors", {"format": "pt"})
    with CheckpointReader(quantised) as reader:
        assert reader.formats.experts[1] is None and reader.formats.experts[0] is not None
        assert (reader.expert_dtype, reader.compute_dtype) == (torch.bfloat16, torch.bfloat16)
        assert reader.expert(0, 2).gate.dtype is torch.float32
        for ours, wide in zip(reader.expert(1, 2), exact, strict=True):
            assert torch.equal(ours, wide.bfloat16())


def test_several_threads_write_the_same_pages(tmp_path: Path) -> None:
    quantised, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS["awq"], num_layers=2, moe_intermediate_size=128)
    with CheckpointReader(quantised) as reader:
        formats = reader.formats.experts[0]
        assert formats is not None
        sizes = [page_bytes(formats.gate_up, 128, 64)] * 2 + [page_bytes(formats.down, 64, 128)]

        def read(key: tuple[int, int]) -> list[torch.Tensor]:
            pages = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
            reader.expert_packed(*key, pages)
            return pages

        keys = [(layer, expert) for layer in range(2) for expert in range(8)] * 3
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(read, keys))
        for key, pages in zip(keys, together, strict=True):
            assert all(map(torch.equal, pages, read(key)))
