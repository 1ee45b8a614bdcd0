"""Our own quantiser: better than plain rounding, read alike by others, and able to go on where it was cut short."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised import KINDS, compressed_decode, foreign_imports, write_quantised_checkpoint
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES, HYBRIDS, write_tiny_checkpoint

from rimuru_models.errors import CheckpointError, NoSpaceError, UsageError
from rimuru_models.quantizer.feedback import feedback_factor, quantize_with_feedback
from rimuru_models.quantizer.groups import best_scales, dequantize_groups, group_of, pack_words, quantize_groups, unpack_words
from rimuru_models.quantizer.layout import Recipe, check_source
from rimuru_models.quantizer.make import finished_copy, quantize_checkpoint
from rimuru_models.quantizer.note import NOTE
from rimuru_models.readers import open_reader
from rimuru_models.tensor_map import names_of
from rimuru_models.weights import CheckpointReader

TOKENS = torch.randint(0, 128, (80,), generator=torch.Generator().manual_seed(5)).tolist()


def copy_of(folder: Path, target: Path, recipe: Recipe, progress: Any = None) -> Path:
    with CheckpointReader(folder) as reader:
        quantize_checkpoint(reader, target, recipe, TOKENS, "a source", progress)
    return target


def plainly_rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    high = (1 << (bits - 1)) - 1
    scale = (x.abs().amax(-1, keepdim=True) / high).bfloat16().float()
    return (x / scale).round().clamp(-high - 1, high) * scale


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 16), bits=st.sampled_from([4, 8]), power=st.sampled_from([1.0, 3.0]), size=st.sampled_from([8, 32]))
def test_the_squared_error_of_every_group_is_at_most_that_of_plain_rounding(seed: int, bits: int, power: float, size: int) -> None:
    x = torch.randn(40, size, generator=torch.Generator().manual_seed(seed))
    x = x.sign() * x.abs() ** power  # heavier tails
    scale = best_scales(x, bits, torch.bfloat16)
    assert (scale > 0).all() and torch.equal(scale, scale.bfloat16().float())
    high = (1 << (bits - 1)) - 1
    ours = ((x / scale).round().clamp(-high - 1, high) * scale - x).square().sum(-1)
    plain = (plainly_rounded(x, bits) - x).square().sum(-1)
    assert (ours <= plain * (1 + 1e-5) + 1e-12).all()
    if bits == 4 and size == 32:
        assert ours.sum() < 0.97 * plain.sum()


@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 3e37])
def test_extreme_groups_stay_finite(magnitude: float) -> None:
    codes, scales = quantize_groups(torch.randn(3, 32) * magnitude, 4, 32, torch.bfloat16)
    assert dequantize_groups(codes, scales).isfinite().all()


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.2.up_proj.weight", "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers_are_said_to_be(to: str, name: str, tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "plain", "qwen3_moe", num_layers=2)
    tensors = load_file(source / "model.safetensors")
    tensors[name][:, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    if to == "int8" and "experts" not in name:
        copy_of(source, tmp_path / "copy", Recipe.of(to))  # what is only copied is copied
        return
    which = r"the up projection of expert 2 in layer 1 has a weight that is not a finite" if "experts" in name else "not finite"
    with pytest.raises(CheckpointError, match=which):
        copy_of(source, tmp_path / "copy", Recipe.of(to))


@pytest.mark.parametrize(("bits", "columns"), [(4, 64), (4, 50), (8, 12), (8, 7)])
def test_words_hold_codes_lowest_bits_first(bits: int, columns: int) -> None:
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    codes = torch.randint(low, high, (3, columns)).to(torch.int8)
    codes[0, 0], codes[0, -1] = low, high - 1
    words = pack_words(codes, bits)
    assert words.dtype is torch.int32 and words.shape == (3, -(-columns * bits // 32))
    for row, expected in zip(words.tolist(), codes.tolist(), strict=True):
        stream = sum((word & 0xFFFFFFFF) << 32 * place for place, word in enumerate(row))
        assert [(stream >> bits * place & ((1 << bits) - 1)) + low for place in range(columns)] == expected
    assert torch.equal(unpack_words(words, bits, columns), codes)


def test_compressed_tensors_unpacks_the_same_codes() -> None:
    pytest.importorskip("transformers")
    with foreign_imports():
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    for bits in (4, 8):
        codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (5, 96)).to(torch.int8)
        assert torch.equal(unpack_from_int32(pack_words(codes, bits), bits, torch.Size((5, 96))), codes)


def test_feedback_lowers_the_error_of_the_outputs() -> None:
    torch.manual_seed(2)
    x = torch.randn(300, 20) @ torch.randn(20, 64) + 0.1 * torch.randn(300, 64)  # inputs that hang together
    weights = torch.randn(1, 48, 64)
    factor = feedback_factor((x.t() @ x).unsqueeze(0), 0.02)
    codes, scales = quantize_with_feedback(weights.clone(), factor, 4, 32, torch.bfloat16)
    plain = quantize_groups(weights[0], 4, 32, torch.bfloat16)
    errors = [(x @ (dequantize_groups(*found) - weights[0]).t()).square().mean() for found in ((codes[0], scales[0]), plain)]
    assert errors[0] < 0.5 * errors[1]


def test_without_inputs_feedback_is_plain_least_squares() -> None:
    weights = torch.randn(2, 6, 64)
    factor = feedback_factor(torch.zeros(2, 64, 64), 0.02)
    codes, scales = quantize_with_feedback(weights.clone(), factor, 4, 32, torch.float32)
    for place in range(2):
        expected = quantize_groups(weights[place], 4, 32, torch.float32)
        assert torch.equal(codes[place], expected[0]) and torch.equal(scales[place], expected[1])


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_every_family_is_copied_and_read(family: str, to: str, tmp_path: Path) -> None:
    layout = "fused" if family in ("qwen3_5_moe", "granitemoehybrid", "olmoe") else "per_expert"
    source = write_tiny_checkpoint(tmp_path / "plain", family, layout=layout, dtype=torch.bfloat16)
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    recipe = Recipe.of(to, 32)
    copy = copy_of(source, tmp_path / "copy", recipe)
    with CheckpointReader(source) as reader:
        assert finished_copy(reader, copy, recipe, "a source")
    assert (copy / "tokenizer.json").read_text(encoding="utf-8") == "{}"
    with CheckpointReader(source) as plain, CheckpointReader(copy) as quantised:
        assert all(formats is not None for formats in quantised.formats.experts.values()) and not quantised.formats.dense
        for name in plain._map.dense:
            assert torch.equal(plain.dense_view(name), quantised.dense_view(name)), name
        for layer in plain.config.moe_layers:
            for expert in range(plain.config.num_experts):
                for ours, theirs in zip(quantised.expert(layer, expert), plain.expert(layer, expert), strict=True):
                    error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
                    assert error < (0.008 if to == "int8" else 0.16), (layer, expert)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert any(module.endswith("self_attn.q_proj") or "in_proj" in module for module in config["ignore"])
    assert not any(module.startswith("model.layers.") and ".experts." in module for module in config["ignore"])
    (group,) = config["config_groups"].values()
    stored = {name: tensor for path in copy.glob("*.safetensors") for name, tensor in load_file(path).items()}
    with CheckpointReader(copy) as quantised:
        layer = quantised.config.moe_layers[-1]
        modules = [
            name.removesuffix(".weight_packed") for piece in quantised.expert_tensors(layer).per_expert[3] for name in names_of(piece)
        ]
        modules = [module for module in modules if not module.endswith((".weight_scale", ".weight_shape"))]
        for module, ours in zip(modules, quantised.expert(layer, 3), strict=True):
            assert re.match(group["targets"][0].removeprefix("re:"), module)
            tensors = {suffix: stored[module + suffix] for suffix in (".weight_packed", ".weight_scale", ".weight_shape")}
            assert torch.equal(compressed_decode(tensors, config, True), ours), "compressed-tensors reads something else"
    names = json.loads((copy / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert set(names) == set().union(*(load_file(path) for path in copy.glob("*.safetensors")))


@pytest.mark.filterwarnings("ignore:You passed")
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("family", [family for family in (*FAMILIES, *HYBRIDS) if family != "granitemoehybrid"])
def test_transformers_reads_the_copy_as_we_do(
    family: str, asked: bool, tmp_path: Path, transformers_module: Any, resident_run: Any
) -> None:
    """Experts of 48 columns have no whole groups of 32, and transformers takes one scheme for all. (Granite is fused there.)"""
    source = write_tiny_checkpoint(tmp_path / "plain", family)
    copy = copy_of(source, tmp_path / "copy", Recipe(4 if asked else 8, 32, feedback=False))
    options = {"quantization_config": transformers_module.CompressedTensorsConfig(dequantize=True)} if asked else {}
    with foreign_imports():
        model = transformers_module.AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, attn_implementation="eager", **options)
    tokens = torch.tensor(TOKENS[:24])
    with torch.inference_mode():
        expected = model.eval()(tokens[None]).logits[0]
    assert (resident_run(copy).run(tokens, [24]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_killed_half_way_it_goes_on_behind_the_last_finished_shard(to: str, tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "plain", "qwen3_moe", dtype=torch.bfloat16)
    whole = copy_of(source, tmp_path / "whole", Recipe.of(to, 32))
    calls = 0

    def killed(stage: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        assert 0 < done <= total
        if calls == 20:
            raise KeyboardInterrupt

    copy = tmp_path / "copy"
    with pytest.raises(KeyboardInterrupt):
        copy_of(source, copy, Recipe.of(to, 32), killed)
    finished = {path: path.stat().st_mtime_ns for path in copy.glob("*.safetensors")}
    assert len(finished) == 3 and not (copy / "config.json").exists() and not list(copy.glob(".*.part"))
    (copy / ".model-00004-of-00005.safetensors.part").write_bytes(b"what a power cut left")
    done: list[tuple[int, int]] = []
    copy_of(source, copy, Recipe.of(to, 32), lambda stage, some, total: done.append((some, total)))
    assert {path: path.stat().st_mtime_ns for path in finished} == finished and done[-1][0] == done[-1][1]
    files = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in copy.iterdir()) == files
    assert all((copy / name).read_bytes() == (whole / name).read_bytes() for name in files)
    done.clear()
    copy_of(source, copy, Recipe.of(to, 32), lambda stage, some, total: done.append((some, total)))
    assert not done, "a finished copy was made again"


@pytest.mark.parametrize("cut_short", [True, False])
@pytest.mark.parametrize("left", [None, 0, 1000, -100])
@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", "tokenizer.json"])
def test_what_was_damaged_is_made_again(name: str, left: int | None, cut_short: bool, tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "plain", "qwen3_moe", num_layers=2)
    (source / "tokenizer.json").write_text("{" + " " * 2000 + "}", encoding="utf-8")
    copy = copy_of(source, tmp_path / "copy", Recipe.of("int8"))
    if cut_short:
        (copy / "config.json").unlink()
    damaged = copy / name
    whole = damaged.read_bytes()
    if left is None:
        damaged.unlink()
    else:
        damaged.write_bytes(whole[:left])
    with CheckpointReader(source) as reader:
        assert not finished_copy(reader, copy, Recipe.of("int8"), "a source")
    looked_at: list[bool] = []
    copy_of(source, copy, Recipe.of("int8"), lambda *_: looked_at.append((copy / "config.json").exists()))
    assert damaged.read_bytes() == whole and (copy / "config.json").exists()
    assert looked_at and not any(looked_at), "half a copy looked like a model"


def test_small_files_follow_the_original(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "plain", "qwen3_moe", num_layers=1)
    (source / "additional_chat_templates").mkdir()
    templates = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    for content in ("{{ 1 }}", "{{ 2 }}"):
        for name in templates:
            (source / name).write_text(content, encoding="utf-8")
        copy = copy_of(source, tmp_path / "copy", Recipe.of("int8"))
        assert all((copy / name).read_text("utf-8") == content for name in templates)
        with CheckpointReader(source) as reader:
            assert finished_copy(reader, copy, Recipe.of("int8"), "a source")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells how much of a process's memory is files")
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_of_a_large_model_only_a_layer_is_in_memory(to: str, tmp_path: Path) -> None:
    """What was read of the mapped original does not stay: eight layers take no more than one."""
    sizes = {"num_layers": 8, "hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 24}
    source = write_tiny_checkpoint(tmp_path / "plain", "qwen3_moe", **sizes)
    file_bytes = (source / "model.safetensors").stat().st_size
    small = write_tiny_checkpoint(tmp_path / "small", "qwen3_moe", num_layers=1)
    copy_of(small, tmp_path / "first", Recipe.of(to))  # libraries are files, too
    process, heights = psutil.Process(), []
    before = process.memory_info().shared
    copy_of(source, tmp_path / "copy", Recipe.of(to), lambda *_: heights.append(process.memory_info().shared - before))
    assert file_bytes > 70e6 and max(heights) < 0.3 * file_bytes


def test_a_full_disk_is_said_in_words_and_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_checkpoint(tmp_path / "plain", "qwen3_moe")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(NoSpaceError, match="lacks room"):
            copy_of(source, tmp_path / "copy", Recipe.of("int8"))

    def full(fd: int) -> None:
        if len(list((tmp_path / "copy").glob("*.safetensors"))) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(NoSpaceError, match="filled up"):
            copy_of(source, tmp_path / "copy", Recipe.of("int8"))
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) == 2 and not list((tmp_path / "copy").glob(".*.part"))
    copy_of(source, tmp_path / "copy", Recipe.of("int8"))


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "plain", "qwen3_moe")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear", encoding="utf-8")
    for target in (tmp_path / "mine", tmp_path / "mine" / "letter.txt", source):
        with pytest.raises(UsageError, match="there already"):
            copy_of(source, target, Recipe.of("int8"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    copy_of(source, tmp_path / "copy", Recipe.of("int8"))
    with pytest.raises(UsageError, match="another copy: it was made or begun as int8 in groups of 128"):
        copy_of(source, tmp_path / "copy", Recipe.of("int4"))
    noted = json.loads((tmp_path / "copy" / NOTE).read_text("utf-8"))
    for field, why in (("source", "its original is another model, or has changed since"), ("version", "another version of rimuru")):
        (tmp_path / "copy" / NOTE).write_text(json.dumps(noted | {field: 0}), encoding="utf-8")
        with pytest.raises(UsageError, match=why):
            copy_of(source, tmp_path / "copy", Recipe.of("int8"))
    (tmp_path / "copy" / NOTE).write_text("[", encoding="utf-8")
    with pytest.raises(UsageError, match="there already"):
        copy_of(source, tmp_path / "copy", Recipe.of("int8"))


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    folder, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS["int8"], num_layers=1)
    with open_reader(folder) as reader, pytest.raises(UsageError, match="already"):
        check_source(reader, folder)


@pytest.mark.parametrize(("to", "group"), [("int3", None), ("INT4", 32), ("int4", 16), ("int4", 0)])
def test_recipes_that_are_not_made(to: str, group: int | None) -> None:
    with pytest.raises(UsageError) as refusal:
        Recipe.of(to, group)
    assert refusal.value.hint is not None and "takes" in refusal.value.hint


def test_groups_fill_rows_exactly() -> None:
    assert [group_of(columns, 32) for columns in (576, 48, 1408, 100)] == [32, 16, 32, 4]


def test_groups_of_one_size_fill_the_rows_of_all_matrices(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "plain", "qwen3_moe", num_layers=1, hidden_size=96, moe_intermediate_size=40)
    with CheckpointReader(source) as reader:
        assert [Recipe.of("int4", group).fitting(reader.config).group for group in (32, 64, 128)] == [8, 8, 8]
    with CheckpointReader(copy_of(source, tmp_path / "copy", Recipe.of("int4"))) as copy:
        formats = copy.formats.experts[0]
        assert formats is not None and formats.gate_up.group == formats.down.group == 8
