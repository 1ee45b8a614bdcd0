from __future__ import annotations

import pytest
from loopback_models import model_files, wanted

from rimuru_cli.hub.remote_files import RemoteFile, check_names, select
from rimuru_models.errors import CheckpointError


def listing(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name, 10, "0" * 40) for name in names]


def taken(*names: str) -> list[str]:
    return sorted(file.name for file in select("org/name", listing(*names)).files)


def test_takes_weights_config_tokenizer_templates_and_licence_only() -> None:
    files = model_files()
    more = ["additional_chat_templates/tool_use.jinja", "LICENSE.md", "NOTICE", "vocab.json", "merges.txt", "added_tokens.json"]
    less = ["LICENSED_DATA/x.json", "trainer_state.json", "model.gguf", "original/model.safetensors", "licence/readme.txt", "figures/a.png"]
    selection = select("org/name", listing(*files, *more, *less))
    assert selection.needs_index
    shards = [name for name in files if name.startswith("model-")]
    narrowed = selection.narrowed(shards)
    assert sorted(file.name for file in narrowed.files) == sorted([*wanted(files), *more])


def test_weights_are_chosen_as_the_loader_does() -> None:
    both = [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
    ]
    assert taken(*both) == ["config.json", "model.safetensors"], "the single file wins, and without the index nobody looks for the shards"
    assert taken("config.json", "a.safetensors", "b.safetensors", "._b.safetensors") == ["a.safetensors", "b.safetensors", "config.json"]


def test_an_index_that_names_a_missing_shard() -> None:
    selection = select("org/name", listing("config.json", "model.safetensors.index.json", "model-1.safetensors"))
    with pytest.raises(CheckpointError, match=r"names 'model-2\.safetensors', which"):
        selection.narrowed(["model-1.safetensors", "model-2.safetensors"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["config.json", "pytorch_model-00001-of-00002.bin"], "pickled weights .*can run any code"),
        (["config.json", "x.ckpt"], "pickled"),
        (["config.json", "mmproj-F16.gguf"], "no .*safetensors"),
        (["config.json", "unet/model.safetensors"], "subfolders"),
        (["config.json", "README.md"], "no .*safetensors"),
        ([], "no .*safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], "no config.json"),
    ],
)
def test_refuses_what_is_no_model(names: list[str], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        select("org/name", listing(*names))
    assert caught.value.hint, "what to do next"


HOSTILE = [
    "../evil.safetensors",
    "x/../../evil",
    "/etc/passwd",
    "\\\\host\\share\\x",
    "\\windows\\x.json",
    "..\\evil.safetensors",
    "a\\b.safetensors",
    "C:\\x.safetensors",
    "c:x.json",
    "x//y",
    "./x",
    "",
    "a" * 2000,
    "con.safetensors",
    "Aux.json",
    "com1.txt",
    "LPT9.model.json",
    "lpt¹.json",
    "x.json:stream.json",
    "what?.json",
    "a\nb.json",
    "a\x1b[2J.bin",
    "\ud800.json",
    " x.json",
    "ü" * 200 + ".json",
    "additional_chat_templates/nul.jinja",
    "LICENSE.",
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:30])
def test_names_that_are_not_what_they_seem_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="nothing of this repository is written") as caught:
        check_names("org/name", ["config.json", "model.safetensors", name])
    assert str(caught.value).isprintable(), "what a stranger wrote cannot reach the terminal as it is"


def test_names_that_differ_in_case_only() -> None:
    with pytest.raises(CheckpointError, match=r"differs from 'model\.safetensors' in case only"):
        check_names("org/name", ["model.safetensors", "Model.SafeTensors"])
    with pytest.raises(CheckpointError, match="case only"):
        check_names("org/name", ["caf\u00e9.json", "cafe\u0301.json"])
    check_names("org/name", ["README.md", "readme.md", "runs/12:30/events", "aux.py", "trailing. ", "weights\\.note", "NUL"])


def test_the_same_name_twice() -> None:
    with pytest.raises(CheckpointError):
        check_names("org/name", ["config.json", "config.json"])
