"""What `rimuru show` says of a model, but for its pages in memory: its parts, profile, files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rimuru_cli.hub.library import profile_of
from rimuru_cli.hub.profiles import ProfileSummary, recorded_profiles
from rimuru_cli.hub.source import ModelSource
from rimuru_models.layout import EMBEDDING, LM_HEAD, num_parameters
from rimuru_models.quantization.precision import notices, precision_of
from rimuru_models.tensor_map import TensorMap, names_of, unused_parts

# Canonical names hold these pieces; the first that matches decides. Biases and head norms belong to the part that they serve.
_PARTS = (
    ("attention", (".self_attn.",)),
    ("recurrent mixers", (".linear_attn.", ".mamba.")),
    ("norms", ("norm.weight",)),
    ("shared experts", (".shared_expert", ".shared_mlp.")),
    ("router", (".mlp.gate.weight",)),
    ("dense MLP", (".mlp.",)),
)
EXPERTS, UNUSED = "experts", "not used"


def describe(source: ModelSource) -> dict[str, Any]:
    """Everything about a model that its files say; JSON-able, sizes in bytes.

    Raises:
        CheckpointError: headers and configuration contradict each other.
    """
    config = source.config
    tensors = source.tensors
    precision = precision_of(config, tensors.formats)
    profile = None if source.path is None else profile_of(source.path, config, recorded_profiles())
    return {
        "name": source.name,
        "place": source.place,
        "path": None if source.path is None else str(source.path),
        "revision": source.revision,
        "architecture": config.architecture,
        "model_type": config.model_type,
        "licence": source.licence,
        "precision": precision.experts,
        "dense_precision": precision.dense,
        "parameters": num_parameters(config),
        "context": config.max_positions,
        "layers": config.num_layers,
        "moe_layers": len(config.moe_layers),
        "attention_layers": len(config.attention_layers),
        "recurrent_layers": len(config.recurrent_layers),
        "experts": config.num_experts,
        "top_k": config.top_k,
        "hidden_size": config.hidden_size,
        "expert_intermediate": config.expert_intermediate,
        "shared_intermediate": config.shared_intermediate,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "bytes_by_part": bytes_by_part(source, tensors),
        "bytes": source.index.total_bytes,
        "not_used": list(unused_parts(tensors.ignored)),
        "notices": list(notices(tensors.formats)),
        "profile": None if profile is None else _profile_facts(profile),
        "files": [{"name": file.name, "bytes": file.num_bytes, "sha256": file.sha256} for file in source.files],
    }


def bytes_by_part(source: ModelSource, tensors: TensorMap) -> dict[str, int]:
    """Bytes in the files of each part of the model, in the order of a forward pass; parts that it does not have are left out.

    Sums up to all tensor data. Tied embeddings count as embeddings; the output matrix is then not listed.
    """
    found = dict.fromkeys(("embeddings", *(part for part, _ in _PARTS), EXPERTS, "output", UNUSED), 0)
    counted: set[str] = set()

    def add(part: str, names: Sequence[str]) -> None:
        for name in names:
            if name not in counted:
                counted.add(name)
                _, info = source.index.tensors[name]
                found[part] += info.stop - info.start

    for canonical, piece in tensors.dense.items():
        add(_part_of(canonical), names_of(piece))
    for layer in tensors.experts.values():
        add(EXPERTS, [name for piece in layer.pieces() for name in names_of(piece)])
    add(UNUSED, list(source.index.tensors))
    return {part: num_bytes for part, num_bytes in found.items() if num_bytes}


def _part_of(canonical: str) -> str:
    if canonical == EMBEDDING:
        return "embeddings"
    if canonical == LM_HEAD:
        return "output"
    return next((part for part, pieces in _PARTS if any(piece in canonical for piece in pieces)), "norms")


def _profile_facts(profile: ProfileSummary) -> dict[str, Any]:
    return {
        "path": str(profile.path),
        "tokens": profile.tokens,
        "top_k": profile.top_k,
        "created": profile.created,
        "coverage": [{"share_of_experts": share, "share_of_selections": covered} for share, covered in profile.coverage.items()],
    }
