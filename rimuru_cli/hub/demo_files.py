"""The small files of the demonstration model: config.json, tokenizer.json and their companions, from the base model's metadata."""

from __future__ import annotations

import json
from typing import Any

from rimuru_cli.hub.gguf_reader import GGUFFile
from rimuru_cli.hub.merge import ModelShape
from rimuru_cli.hub.recipe import Recipe
from rimuru_models.errors import CheckpointError

_CONTROL_TOKEN = 3


def small_files(base: GGUFFile, shape: ModelShape, recipe: Recipe) -> dict[str, bytes]:
    """File name -> content of everything in the model folder but the weights. CheckpointError when metadata is missing or wrong."""
    ids = {
        "bos_token_id": base.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": base.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": base.integer("tokenizer.ggml.padding_token_id"),
    }
    tokens = base.strings("tokenizer.ggml.tokens")
    kinds = base.integers("tokenizer.ggml.token_type")
    unknown = base.integer("tokenizer.ggml.unknown_token_id")
    if len(kinds) != len(tokens) or len(tokens) != shape.vocab_size or not all(0 <= i < len(tokens) for i in (*ids.values(), unknown)):
        raise CheckpointError(f"{base.path.name} is not a usable GGUF file: its tokens do not fit its {shape.vocab_size} embeddings.")
    special = [index for index, kind in enumerate(kinds) if kind == _CONTROL_TOKEN]
    names = {name.removesuffix("_id"): tokens[index] for name, index in ids.items()} | {"unk_token": tokens[unknown]}
    return {
        "config.json": _json(_config(shape) | ids),
        "generation_config.json": _json(ids | {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.05}),
        "tokenizer.json": _tokenizer(tokens, base.strings("tokenizer.ggml.merges"), special).encode("utf-8"),
        "tokenizer_config.json": _json(_tokenizer_config(base, shape, tokens, special) | names),
        "special_tokens_map.json": _json(names),
        "NOTICE.md": (recipe.folder / "NOTICE.md").read_bytes(),
        "LICENSE": (recipe.folder / "LICENSE").read_bytes(),
    }


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.rms_eps,
        # Both spellings: older and newer readers of config.json look in different places.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "sliding_window": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(base: GGUFFile, shape: ModelShape, tokens: list[str], special: list[int]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context_length,
        "added_tokens_decoder": {str(index): {"content": tokens[index], **flags} for index in special},
        "chat_template": base.string("tokenizer.chat_template"),
    }


def _tokenizer(tokens: list[str], merges: list[str], special: list[int]) -> str:
    """tokenizer.json: byte-level BPE in which every digit is a piece of its own (what GGUF calls "smollm")."""
    # Imported here: it takes its time, and a model that is already built does not need it.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    except Exception as error:  # the library raises a bare Exception for a merge whose parts are not tokens
        raise CheckpointError(f"The base model's tokenizer is unusable: {error}.") from error
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False) for index in special])
    return tokenizer.to_str()


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8") + b"\n"
