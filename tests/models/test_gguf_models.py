"""GGUF files of every family against transformers in float32, with the weights that the `gguf` package reads out of the same blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import write_tiny_checkpoint
from tiny_gguf import ARCHITECTURES, write_tiny_gguf

from rimuru_kernels.packed_weights import dequantize, page_bytes, tile_rows, unpack
from rimuru_models.errors import CheckpointError, NotFoundError, RimuruError
from rimuru_models.gguf.files import open_gguf
from rimuru_models.gguf.header import parse_gguf_header
from rimuru_models.gguf.kinds import BY_NAME, PACKED
from rimuru_models.gguf.reader import GGUFReader
from rimuru_models.index import model_identity, open_index
from rimuru_models.layout import dense_shapes
from rimuru_models.quantization.precision import precision_of
from rimuru_models.readers import notices_of, open_reader
from rimuru_models.tensor_map import resolve, unused_parts
from rimuru_models.weights import CheckpointReader

TOKENS = 75
TOLERANCE = 1e-4
TYPES = [*PACKED, "F32", "F16", "BF16"]
WIDE = {"hidden_size": 256, "num_layers": 2}


def tokens(count: int = TOKENS, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def compare(reference_model: Callable[[Path], Any], resident_run: Any) -> Callable[[Path, Path], None]:
    """Compare the logits of a GGUF file with the reference's of the checkpoint that it means."""

    def check(path: Path, meant: Path) -> None:
        with torch.inference_mode():
            expected = reference_model(meant)(tokens()[None]).logits[0]
        assert expected.std() > 0.5
        actual = resident_run(path).run(tokens(), [33, 32] + [1] * (TOKENS - 65))
        assert (actual - expected).abs().max() < TOLERANCE

    return check


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family(family: str, tmp_path: Path, compare: Any) -> None:
    compare(*write_tiny_gguf(tmp_path, family, seed=len(family)))


def test_all_value_heads_may_have_a_key_head_of_their_own(tmp_path: Path, compare: Any) -> None:
    compare(*write_tiny_gguf(tmp_path, "qwen3_5_moe", linear_num_key_heads=4, nested=False))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_several_value_heads_for_each_of_several_key_heads(family: str, tmp_path: Path, compare: Any) -> None:
    options = {"linear_num_key_heads": 3, "linear_num_value_heads": 12, "linear_value_head_dim": 32, "num_layers": 4}
    compare(*write_tiny_gguf(tmp_path, family, lambda name: "Q4_0", **options))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_5_moe", "granitemoehybrid"])
def test_types_mixed_by_tensor_and_layer(family: str, tmp_path: Path, compare: Any) -> None:
    # as quantisers do it: more bits for down and for some layers, others where rows are no multiple of 256
    def kind_of(name: str) -> str:
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        if "_exps" in name:
            return ("Q6_K" if layer % 2 else "Q5_K") if "down" in name else "Q4_K"
        return ["Q8_0", "Q4_1", "BF16", "F16", "Q6_K", "Q5_0", "Q5_1", "MXFP4"][len(name) * 7 % 8]

    sizes = WIDE | {"hidden_size": 256}
    sizes |= {"mamba_n_heads": 32} if family == "granitemoehybrid" else {}
    sizes |= {"layer_types": ["mamba", "attention"]} if family == "granitemoehybrid" else {}
    sizes |= {"full_attention_interval": 2} if family == "qwen3_5_moe" else {}
    width = "intermediate_size" if family in ("mixtral", "granitemoehybrid") else "moe_intermediate_size"
    path, meant = write_tiny_gguf(tmp_path, family, kind_of, **{width: 256}, **sizes)
    compare(path, meant)
    with GGUFReader(path) as reader:
        first, second = (reader.formats.experts[layer] for layer in (0, 1))
        assert first is not None and second is not None
        assert (first.gate_up, first.down) == (PACKED["Q4_K"], PACKED["Q5_K"])
        assert second.down == PACKED["Q6_K"]
        assert reader.compute_dtype is torch.bfloat16


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_as_experts(kind: str, tmp_path: Path, compare: Any) -> None:
    path, meant = write_tiny_gguf(tmp_path, "qwen3_moe", lambda name: kind, moe_intermediate_size=256, num_experts=4, **WIDE)
    compare(path, meant)
    with GGUFReader(path) as reader, CheckpointReader(meant) as plain:
        quantised = kind in PACKED
        for layer in reader.config.moe_layers:
            assert (reader.formats.experts[layer] is not None) == quantised
            for expert in (0, 3):
                wanted = plain.expert(layer, expert)
                for actual, right in zip(reader.expert(layer, expert), wanted, strict=True):
                    assert actual.dtype is (
                        torch.float32 if quantised else {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
                    )
                    assert torch.equal(actual.float(), right)
                if quantised:
                    for codes, right in zip(reader.expert_codes(layer, expert), wanted, strict=True):
                        assert torch.equal(dequantize(codes, PACKED[kind]), right)
        if not quantised:
            (file, start, size), *_ = reader.expert_extents(0, 2) or []
            with file.open("rb") as stream:
                stream.seek(start)
                assert stream.read(size) == reader.expert(0, 2).gate.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("tiles", [1, 4])
def test_experts_go_into_pages_as_stored(tiles: int, tmp_path: Path) -> None:
    path, meant = write_tiny_gguf(
        tmp_path, "qwen3_moe", lambda name: "Q6_K" if "down" in name else "Q4_K", moe_intermediate_size=256, num_experts=4, **WIDE
    )
    with GGUFReader(path) as reader, CheckpointReader(meant) as plain:
        formats = reader.formats.experts[1]
        assert formats is not None
        kinds = [formats.gate_up] * 2 + [formats.down]
        sizes = [page_bytes(kind, 256 // tiles, 256) for kind in kinds for _ in range(tiles)]
        pages = [torch.full((size + 64,), 7, dtype=torch.uint8) for size in sizes]
        reader.expert_packed(1, 2, pages)
        for part, right in enumerate(plain.expert(1, 2)):
            found = [dequantize(unpack(page, kinds[part], 256 // tiles, 256), kinds[part]) for page in pages[part * tiles :][:tiles]]
            assert torch.equal(torch.cat(found), right)
        assert all((page[size:] == 7).all() for page, size in zip(pages, sizes, strict=True))
        with pytest.raises(ValueError, match="pages"):
            reader.expert_packed(1, 2, pages[:2])


HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize(("kind", "at"), [*((kind, at) for kind, places in HALVES.items() for at in places), ("MXFP4", 0)])
def test_scales_that_are_no_finite_numbers(kind: str, at: int, tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, "qwen3_moe", lambda name: kind, moe_intermediate_size=256, num_experts=4, **WIDE)
    tensor = open_gguf(path).tensors["blk.1.ffn_up_exps.weight"][1]
    expert = (tensor.stop - tensor.start) // 4
    last = tensor.start + 3 * expert - BY_NAME[kind].num_bytes + at  # the last block of expert 2
    data = bytearray(path.read_bytes())
    data[last : last + 2] = b"\xff\xff" if kind == "MXFP4" else b"\x00\x7c"
    path.write_bytes(data)
    with GGUFReader(path) as reader:
        pages = [torch.zeros(1 << 17, dtype=torch.uint8) for _ in range(3)]
        reader.expert_packed(1, 1, pages)
        reader.expert(1, 3)
        refusal = r"tiny\.gguf: tensor 'blk\.1\.ffn_up_exps\.weight' has a scale that is not a finite number"
        for read in (reader.expert, reader.expert_codes, lambda layer, one: reader.expert_packed(layer, one, pages)):
            with pytest.raises(CheckpointError, match=refusal):
                read(1, 2)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_dense_matrices_as_stored_mean_the_same(family: str, tmp_path: Path) -> None:
    options = {"linear_value_head_dim": 32} if family.startswith("qwen3_5") else {}
    path, _ = write_tiny_gguf(tmp_path, family, lambda name: "Q4_0", **options)
    with GGUFReader(path) as reader:
        quantised = 0
        for name in dense_shapes(reader.config):
            codes = reader.dense_codes(name)
            assert (codes is not None) == (name in reader.formats.dense)
            if codes is not None:
                quantised += 1
                assert torch.equal(dequantize(*codes), reader.dense_view(name))
        assert quantised > reader.config.num_layers
        if family == "qwen3_5_moe":
            assert "model.layers.0.linear_attn.out_proj.weight" in reader.formats.dense, "its columns move in whole blocks"


def test_columns_that_tear_blocks_apart_are_read_as_numbers(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, "qwen3_5_moe", lambda name: "Q4_0", linear_num_value_heads=8, linear_value_head_dim=16)
    with GGUFReader(path) as reader:
        assert "model.layers.0.linear_attn.out_proj.weight" not in reader.formats.dense
        assert reader.dense_codes("model.layers.0.linear_attn.out_proj.weight") is None


@pytest.mark.parametrize(("family", "how"), [("mixtral", "old"), ("qwen3_next", "old"), ("qwen3_next", "fuse"), ("qwen3_5_moe", "fuse")])
def test_older_and_newer_arrangements(family: str, how: str, tmp_path: Path, compare: Any) -> None:
    compare(*write_tiny_gguf(tmp_path, family, lambda name: "Q5_1", **{how: True}))


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path, compare: Any) -> None:
    path, meant = write_tiny_gguf(tmp_path, "qwen3_5_moe", mtp=1)
    compare(path, meant)
    with GGUFReader(path) as reader:
        assert reader.ignored == ("blk.4.nextn.eh_proj.weight",)
        assert reader.unused_parts == ("the head that guesses several tokens at once (1 tensors)",)
        assert notices_of(reader)[0] == "Of this checkpoint, the head that guesses several tokens at once (1 tensors) is not used."
    assert unused_parts(resolve(open_index(path), reader.config).ignored) == reader.unused_parts


def test_experts_that_do_not_stay_as_they_are_stored_are_announced(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, "qwen3_moe", lambda name: "Q8_0" if "up_exps" in name else "Q4_0", moe_intermediate_size=64)
    with GGUFReader(path) as reader:
        (notice,) = notices_of(reader)
        assert "stored in several ways (Q4_0 and Q8_0), so they are held as F32" in notice
        assert precision_of(reader.config, reader.formats).experts == "F32"
    plain, _ = write_tiny_gguf(tmp_path, "qwen3_moe", lambda name: "F16" if "up_exps" in name else "BF16", name="plain")
    with GGUFReader(plain) as reader:
        assert not notices_of(reader), "plain numbers are nothing to warn of"


def test_dense_matrices_are_called_what_they_are_stored_as(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, "qwen3_moe", lambda name: "Q4_0", moe_intermediate_size=64)
    with GGUFReader(path) as reader:  # routers are numbers in such files
        assert precision_of(reader.config, reader.formats) == ("Q4_0", "Q4_0 and F32")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {"tie_word_embeddings": True, "head_dim": None}),
        ("mixtral", {"num_key_value_heads": 1, "num_local_experts": 5, "num_experts_per_tok": 5}),
        ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_layers": 4}),
        ("qwen3_moe", {"rope_theta": 70.0, "num_experts_per_tok": 1}),
        ("qwen3_next", {"mlp_only_layers": [1]}),
        ("granitemoehybrid", {"mamba_n_groups": 2, "tie_word_embeddings": False, "mamba_conv_bias": True}),
        ("granitemoehybrid", {"position_embedding_type": "rope"}),
    ],
)
def test_options(family: str, options: dict[str, Any], tmp_path: Path, compare: Any) -> None:
    compare(*write_tiny_gguf(tmp_path, family, lambda name: "Q4_1", **options))


@pytest.mark.parametrize("parts", [2, 5])
def test_split_files(parts: int, tmp_path: Path, compare: Any) -> None:
    path, meant = write_tiny_gguf(tmp_path, "qwen2_moe", parts=parts)
    assert len(list(tmp_path.glob("*.gguf"))) == parts
    compare(path, meant)
    # any part names the model, and so does the folder
    with open_reader(path.with_name(f"tiny-{parts:05d}-of-{parts:05d}.gguf")) as reader, open_reader(tmp_path) as other:
        assert isinstance(reader, GGUFReader) and isinstance(other, GGUFReader)
        assert reader.files.path == other.files.path == path
    path.with_name(f"tiny-{parts:05d}-of-{parts:05d}.gguf").unlink()
    with pytest.raises(CheckpointError, match=f"the part .*{parts:05d}-of-{parts:05d}.* is missing"):
        open_reader(path)


def test_parts_of_different_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, _ = write_tiny_gguf(tmp_path / "a", "qwen2_moe", parts=2)
    other, _ = write_tiny_gguf(tmp_path / "b", "qwen2_moe", parts=3)
    second = first.with_name("tiny-00002-of-00002.gguf")
    second.write_bytes(other.with_name("tiny-00002-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match="is not part 2 of 2") as caught:
        open_reader(first)
    assert "side by side under their own names" in str(caught.value.hint)
    renamed = first.rename(tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match="one of 2 parts, but its name makes it one of 1"):
        open_reader(renamed)


def test_identity_ignores_parts_and_sees_types(tmp_path: Path) -> None:
    paths = []
    for number, (kind, parts) in enumerate([("Q8_0", 1), ("Q8_0", 3), ("Q4_0", 1)]):
        (tmp_path / str(number)).mkdir()
        paths.append(write_tiny_gguf(tmp_path / str(number), "olmoe", lambda name, kind=kind: kind, parts=parts)[0])
    one, same, other = map(model_identity, paths)
    assert one == same != other


def test_a_folder_of_safetensors_is_opened_as_before(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "plain", "olmoe")
    path, _ = write_tiny_gguf(tmp_path, "olmoe")
    (folder / "extra.gguf").write_bytes(path.read_bytes())
    with open_reader(folder) as reader:
        assert isinstance(reader, CheckpointReader)
    with pytest.raises(NotFoundError):
        open_reader(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_uint32("qwen3moe.expert_gating_func", 2), "expert_gating_func is set"),
        (lambda w: w.add_float32("qwen3moe.expert_weights_scale", 2.5), "expert_weights_scale is set"),
        (lambda w: w.add_bool("qwen3moe.attention.causal", False), "causal is set"),
        (lambda w: w.add_float32("qwen3moe.attention.scale", 0.3), "attention.scale is set"),
        (lambda w: w.add_float32("qwen3moe.final_logit_softcapping", 30.0), "softcapping is set"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "'yarn'"),
        (lambda w: w.add_rope_scaling_factor(4.0), "'scaled'"),
        (lambda w: w.add_rope_dimension_count(16), "turns 16 of 32 dimensions"),
        (lambda w: w.add_tensor("blk.0.attn_sinks.weight", torch.zeros(4).numpy()), "has no place in a Qwen3MoeForCausalLM"),
        (lambda w: w.add_tensor("blk.99.x.weight", torch.zeros(4).numpy()), None),
    ],
)
def test_what_would_change_the_result_is_refused(change: Any, message: str | None, tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, "qwen3_moe", more=change)
    if message is None:
        open_reader(path).close()
        return
    with pytest.raises(CheckpointError, match=message):
        open_reader(path)


def test_other_architectures_and_types_are_refused_with_what_is_supported(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "dense.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 8).numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(CheckpointError, match="'gemma3' is not supported") as caught:
        open_reader(tmp_path / "dense.gguf")
    assert "qwen3moe" in str(caught.value.hint)

    def unsupported(writer: gguf.GGUFWriter) -> None:
        raw = torch.zeros(128, 18 * 2, dtype=torch.uint8).numpy()
        writer.tensors[0].pop("token_embd.weight", None)
        writer.add_tensor("output_x", raw, raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)

    path, _ = write_tiny_gguf(tmp_path, "qwen3_moe", more=unsupported)
    with pytest.raises(CheckpointError, match="has no place"):
        open_reader(path)
    data = path.read_bytes()
    # the embedding's type, 8 for Q8_0, becomes IQ4_NL: smaller, so that it still lies within the file
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 16
    assert data[at] == 8
    path.write_bytes(data[:at] + bytes([20]) + data[at + 1 :])
    with pytest.raises(CheckpointError, match="stored as IQ4_NL, which cannot be computed with") as caught:
        open_reader(path)
    assert "Q4_K" in str(caught.value.hint)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, "mixtral")
    data = path.read_bytes()
    at = data.index(b"llama.expert_count") + len(b"llama.expert_count") + 4
    path.write_bytes(data[:at] + bytes(4) + data[at + 4 :])
    with pytest.raises(CheckpointError, match="only mixture-of-experts models"):
        open_reader(path)


SMALL: dict[str, bytes] = {}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4),
    family=st.sampled_from(["qwen3_5_moe", "mixtral"]),
)
def test_a_damaged_header_is_an_error_in_words_or_harmless(changes: list[tuple[int, int]], family: str, tmp_path: Path) -> None:
    if family not in SMALL:
        (tmp_path / family).mkdir()
        SMALL[family] = write_tiny_gguf(tmp_path / family, family, num_layers=2, full_attention_interval=2, old=family == "mixtral")[
            0
        ].read_bytes()
    data = bytearray(SMALL[family])
    end = parse_gguf_header(bytes(data), len(data), "x").data_offset
    for position, value in changes:
        data[position % end] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    try:
        reader = open_reader(path)
    except RimuruError:
        return
    with reader:
        reader.expert(reader.config.moe_layers[-1], 0)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("mixtral", "llama.attention.head_count", 65536),
        ("mixtral", "llama.expert_count", 65535),
        ("qwen3_5_moe", "qwen35moe.ssm.time_step_rank", 65536),
        ("qwen3_5_moe", "qwen35moe.ssm.group_count", 0),
        ("qwen3_5_moe", "qwen35moe.ssm.time_step_rank", 0),
        ("qwen3_5_moe", "qwen35moe.attention.key_length", 0),
        ("granitemoehybrid", "granitehybrid.embedding_length", 0),
        ("granitemoehybrid", "granitehybrid.attention.head_count", 0),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_made_of_them(family: str, key: str, value: int, tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, family, num_layers=4, old=family == "mixtral")
    data = path.read_bytes()
    at = data.index(key.encode()) + len(key) + 4
    path.write_bytes(data[:at] + value.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError):
        open_reader(path)


def test_a_file_that_shrinks_while_it_is_in_use(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, "olmoe", num_layers=2)
    with open_reader(path) as reader:
        path.write_bytes(path.read_bytes()[:-4096])
        with pytest.raises(CheckpointError, match="shrank from"):
            reader.expert(0, 0)


@pytest.mark.parametrize("tiles", [(2, 3), (3, 2), (1, 3)])
def test_row_tiles_of_different_numbers(tiles: tuple[int, int], tmp_path: Path) -> None:
    """256 rows in three tiles are 96, 96 and 64; the last page has the places of 96 rows, of which the last 32 keep what they held."""
    path, meant = write_tiny_gguf(
        tmp_path, "qwen3_moe", lambda name: "Q6_K" if "down" in name else "Q4_K", moe_intermediate_size=256, num_experts=4, **WIDE
    )
    with GGUFReader(path) as reader, CheckpointReader(meant) as plain:
        kinds = [reader.formats.experts[1].gate_up] * 2 + [reader.formats.experts[1].down]
        counts = (tiles[0], tiles[0], tiles[1])
        heights = [tile_rows(256, count) for count in counts]
        pages = [[torch.full((page_bytes(kind, rows, 256),), 7, dtype=torch.uint8) for _ in range(count)]
                 for kind, rows, count in zip(kinds, heights, counts, strict=True)]  # fmt: skip
        reader.expert_packed(1, 2, [page for own in pages for page in own], tiles)
        for own, kind, rows, right in zip(pages, kinds, heights, plain.expert(1, 2), strict=True):
            read = torch.cat([dequantize(unpack(page, kind, rows, 256), kind) for page in own])
            assert torch.equal(read[:256], right)
            assert all((unpack(page, kind, rows, 256).super_scales.view(torch.uint8)[64:] == 7).all() for page in own[-1:] if rows == 96)
        for wrong in ((2, 2), (0, 7), (3, 3)):
            with pytest.raises(ValueError, match="row tiles"):
                reader.expert_packed(1, 2, [pages[0][0]] * 7, wrong)
