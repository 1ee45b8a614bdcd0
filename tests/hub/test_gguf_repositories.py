"""Repositories of GGUF files: which one is pulled, and what the library says and does about it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cached_models import put_in_cache
from huggingface_hub import constants, hf_hub_download, scan_cache_dir
from loopback_hub import Fault, LoopbackHub
from loopback_models import model_files
from loopback_pulls import Ear, no_wait
from loopback_setup import connect
from tiny_gguf import write_tiny_gguf

from rimuru_cli.hub import variants
from rimuru_cli.hub.download import Download, Pulled
from rimuru_cli.hub.download_plan import Plan, finished_plan, make_plan
from rimuru_cli.hub.fit import FitVerdict
from rimuru_cli.hub.library import LibraryModel, find_models
from rimuru_cli.hub.pull_manifest import PullManifest
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.removal import carry_out, plan_removal
from rimuru_cli.hub.resolve import parse_repository, resolve_model
from rimuru_cli.hub.show import describe
from rimuru_cli.hub.source import open_source
from rimuru_cli.hub.usage import record_use
from rimuru_cli.hub.variants import Variant, choose, matching, variants_of
from rimuru_cli.hub.verification import verify_model
from rimuru_models.errors import CheckpointError, NotFoundError, UsageError
from rimuru_models.gguf.files import part_names

NAME = "org/tiny-GGUF"
PARTS = ("Q8_0/tiny-Q8_0-00001-of-00002.gguf", "Q8_0/tiny-Q8_0-00002-of-00002.gguf")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository with one model in three ways, one of them in two files, and what usually lies beside them."""
    found: dict[str, bytes] = {}
    for kind, parts in (("Q4_0", 1), ("Q8_0", 2), ("Q5_1", 1)):
        folder = tmp_path_factory.mktemp(kind)
        path, _ = write_tiny_gguf(
            folder, "olmoe", lambda name, kind=kind: kind, parts=parts, num_layers=2, intermediate_size=64, name=f"tiny-{kind}"
        )
        where = "Q8_0/" if parts == 2 else ""
        found |= {where + one.name: one.read_bytes() for one in folder.glob("*.gguf")}
        assert (where + path.name) in found
    found["tiny-UD-Q5_1.gguf"] = found.pop("tiny-Q5_1.gguf")
    return found | {
        "mmproj-F16.gguf": b"GGUF" * 100,
        "README.md": b"#",
        "LICENSE": b"Apache License 2.0\n" * 40,
        "config.json": b"{}",
        "imatrix.dat": b"i",
    }


@pytest.fixture
def server(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with LoopbackHub(store=True) as hub:
        hub.add(NAME, files)
        connect(monkeypatch, hub, tmp_path / "hf" / "hub")
        yield hub


@pytest.fixture
def cache(server: LoopbackHub, tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub"


def planned(variant: str | None, name: str = NAME) -> tuple[Plan, Hub]:
    hub = Hub(wait=no_wait)
    return make_plan(hub, name, "main", None if name in ("org/plain", "org/both") else fits_any, variant), hub


def fits_any(name: str, config: Any, index: Any = None) -> FitVerdict:
    assert index.gguf is not None and config.num_experts == 8
    return FitVerdict(True, "cpu", "runs", None, None, {})


def pull(variant: str | None, name: str = NAME) -> tuple[Pulled, Ear]:
    plan, hub = planned(variant, name)
    ear = Ear()
    return Download(plan, hub, ear, 4).run(), ear


def only(name: str) -> LibraryModel:
    return next(model for model in find_models() if model.name == name)


def damage(path: Path) -> None:
    path = path.resolve()
    data = bytearray(path.read_bytes())
    data[-40] ^= 4
    path.write_bytes(data)


# ---- names


def test_names_of_variants() -> None:
    names = """Qwen3-30B-A3B-Q4_K_M.gguf Qwen3-30B-A3B-UD-Q4_K_XL.gguf BF16/Q-BF16-00001-of-00002.gguf BF16/Q-BF16-00002-of-00002.gguf
        mmproj-F16.gguf imatrix_unsloth.gguf qwen1_5-moe-a2_7b-chat-q5_0.gguf x-MXFP4_MOE.gguf UD-Q3_K_XL/model.gguf plain.gguf
        part-Q2_K-00002-of-00002.gguf .hidden-Q6_K.gguf a-Q8_0.gguf b-Q8_0.gguf x-iq4_xs.gguf note.txt""".split()
    found = {one.label: one for one in variants_of(dict.fromkeys(names, 10))}
    assert sorted(found) == sorted(
        ["Q4_K_M", "UD-Q4_K_XL", "BF16", "Q5_0", "MXFP4_MOE", "UD-Q3_K_XL", "plain", "Q2_K", "a-Q8_0", "b-Q8_0", "IQ4_XS"]
    )
    assert found["BF16"] == Variant("BF16", ("BF16/Q-BF16-00001-of-00002.gguf", "BF16/Q-BF16-00002-of-00002.gguf"), 20)
    assert found["Q2_K"].missing == ("part-Q2_K-00001-of-00002.gguf",)
    everything = list(found.values())
    for wanted, label in [
        ("q4_k_m", "Q4_K_M"),
        ("q4_k_xl", "UD-Q4_K_XL"),
        ("bf16", "BF16"),
        ("A-Q8_0", "a-Q8_0"),
        ("b-q8_0.gguf", "b-Q8_0"),
    ]:
        assert choose("o/n", everything, wanted).label == label
    assert {one.label for one in matching(everything, "q8_0")} == {"a-Q8_0", "b-Q8_0"}
    both = variants_of({"m-Q4_K_M.gguf": 1, "m-UD-Q4_K_M.gguf": 1})
    assert choose("o/n", both, "Q4_K_M").label == "Q4_K_M", "the exact one"


def test_every_label_can_be_typed() -> None:
    """Two models with one quantisation are told apart by their files' names, in which may be folders, blanks and other letters."""
    names = ("Q4_0/m.gguf", "Q4_0/n (new).gguf", "模型 7.gguf", "x-v1.5+.gguf")
    for one in variants_of(dict.fromkeys(names, 1)):
        assert parse_repository(f"{NAME}:{one.label}@main") == (NAME, "main", one.label)
        assert matching(variants_of(dict.fromkeys(names, 1)), one.label) == [one]


def test_names_that_differ_in_case_only() -> None:
    """Each can be named, by its whole name; what does not say which of them is meant is asked about."""
    names = ("m-Q4_0.gguf", "m-Q4_0.GGUF", "M-Q4_0.gguf", "Q8_0/a.gguf", "q8_0/a.gguf")
    found = variants_of(dict.fromkeys(names, 1))
    assert sorted(one.label for one in found) == sorted(names)
    for one in found:
        assert choose("o/n", found, one.label) is one and choose("o/n", found, one.names[0]) is one
    with pytest.raises(UsageError, match=r"several models that q4_0 can mean: .*m-Q4_0\.GGUF") as caught:
        choose("o/n", found, "q4_0")
    assert "o/n:" in str(caught.value.hint)


def test_thousands_of_parts_are_taken_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(variants, "part_names", lambda name: asked.append(name) or part_names(name))
    files = {f"m-Q4_0-{number:05d}-of-00900.gguf": 1 for number in range(2, 900)}
    (found,) = variants_of(files)
    assert (found.label, found.num_bytes) == ("Q4_0", 898) and found.missing == ("m-Q4_0-00001-of-00900.gguf", "m-Q4_0-00900-of-00900.gguf")
    assert len(asked) == 1, "once a file would take minutes"


def test_names_are_taken_apart() -> None:
    assert parse_repository("org/name:Q4_K_M@v1") == ("org/name", "v1", "Q4_K_M")
    assert parse_repository("org/name:UD-Q4_K_XL").shown == "org/name:UD-Q4_K_XL"
    for wrong in ("org/name:", "org/name:/b", "org/name:../b", "org/name:a:b", "org/name: x", "org/name:x ", "org/name@v1:Q4"):
        with pytest.raises((UsageError, NotFoundError)):
            parse_repository(wrong)


# ---- pull


@pytest.mark.parametrize("wanted", ["Q4_0", "q4_0", "tiny-Q4_0.gguf"])
def test_one_file(wanted: str, cache: Path, server: LoopbackHub, files: dict[str, bytes]) -> None:
    pulled, ear = pull(wanted)
    commit = server.repositories[NAME].refs["main"]
    assert pulled.path == cache / "models--org--tiny-GGUF" / "snapshots" / commit / "tiny-Q4_0.gguf"
    assert pulled.path.read_bytes() == files["tiny-Q4_0.gguf"]
    assert set(ear.files) == {"tiny-Q4_0.gguf", "LICENSE"}
    assert server.sent() == len(files["tiny-Q4_0.gguf"]) + len(files["LICENSE"]), "nothing else, and nothing twice"
    assert hf_hub_download(NAME, "tiny-Q4_0.gguf", local_files_only=True) == str(pulled.path)
    assert not scan_cache_dir(cache).warnings
    assert resolve_model(f"{NAME}:{wanted}").path == pulled.path == resolve_model(NAME).path
    assert resolve_model(NAME).name == f"{NAME}:Q4_0"


def test_parts_in_a_folder(cache: Path, files: dict[str, bytes]) -> None:
    plan, _ = planned("q8_0")
    assert (plan.name, plan.variant, plan.architecture, plan.objections) == (f"{NAME}:Q8_0", "Q8_0", "olmoe", ())
    assert plan.total_bytes == sum(len(files[name]) for name in (*PARTS, "LICENSE"))
    pulled, ear = pull("Q8_0")
    assert set(ear.files) == {*PARTS, "LICENSE"}
    assert pulled.path.as_posix().endswith(PARTS[0])
    assert resolve_model(f"{NAME}:Q8_0").path == pulled.path


def test_several_variants_of_one_commit_live_side_by_side(server: LoopbackHub, files: dict[str, bytes]) -> None:
    first, _ = pull("Q4_0")
    before = server.sent()
    second, _ = pull("UD-Q5_1")
    assert server.sent() - before == len(files["tiny-UD-Q5_1.gguf"]), "the licence is here already"
    assert resolve_model(f"{NAME}:Q4_0").path == first.path and resolve_model(f"{NAME}:q5_1").path == second.path
    manifest = PullManifest.read(NAME, first.path.parent.name)
    assert manifest is not None and set(manifest.files) == {"tiny-Q4_0.gguf", "tiny-UD-Q5_1.gguf", "LICENSE"}
    with pytest.raises(UsageError, match=r"holds several quantisations: Q4_0 \(.*\), UD-Q5_1 \(") as caught:
        resolve_model(NAME)
    assert f"{NAME}:Q4_0" in str(caught.value.hint)
    with pytest.raises(NotFoundError, match=r"Q8_0 is not in the Hugging Face cache; here is Q4_0") as caught:
        resolve_model(f"{NAME}:Q8_0")
    assert f"rimuru pull {NAME}:Q8_0" in str(caught.value.hint)


def test_pulling_again_asks_for_nothing(server: LoopbackHub) -> None:
    pull("Q4_0")
    sent = server.sent()
    plan, _ = planned("q4_0")
    assert plan.complete and plan.missing_bytes == 0 and plan.variant == "Q4_0" and server.sent() == sent
    assert (finished_plan(NAME, "main", "Q4_0"), finished_plan(NAME, "main", "Q8_0")) == (plan, None)
    other, _ = planned("Q8_0")
    assert not other.complete and other.missing_bytes > 0


def test_without_a_name_only_one_model_is_taken(server: LoopbackHub, files: dict[str, bytes]) -> None:
    with pytest.raises(UsageError, match=r"Q4_0 \(.* KiB\), Q8_0 \(.* KiB\), UD-Q5_1 \(.* KiB\)"):
        planned(None)
    with pytest.raises(NotFoundError, match=r"has no Q6_K; there are Q4_0 \(") as caught:
        planned("Q6_K")
    assert f"{NAME}:Q4_0" in str(caught.value.hint)
    server.add("org/single", {name: files[name] for name in ("tiny-Q4_0.gguf", "mmproj-F16.gguf")})
    plan, _ = planned(None, "org/single")
    assert plan.variant == "Q4_0" and [file.name for file in plan.files] == ["tiny-Q4_0.gguf"]
    server.add("org/plain", model_files())
    with pytest.raises(NotFoundError, match="has no GGUF files, so it has no Q4_0"):
        planned("Q4_0", "org/plain")


def test_safetensors_come_first_where_both_are(server: LoopbackHub, files: dict[str, bytes]) -> None:
    server.add("org/both", model_files(shards=1) | {"x-Q4_0.gguf": files["tiny-Q4_0.gguf"]})
    plan, _ = planned(None, "org/both")
    assert plan.variant is None and "model.safetensors" in {file.name for file in plan.files}
    pull(None, "org/both")
    plain = resolve_model("org/both")
    pulled, _ = pull("Q4_0", "org/both")
    assert resolve_model("org/both") == plain and resolve_model("org/both:Q4_0").path == pulled.path
    assert {model.name for model in find_models()} == {"org/both", "org/both:Q4_0"}
    assert verify_model("org/both:Q4_0").bad == () and verify_model("org/both").bad == ()


def test_a_repository_that_lacks_a_part(server: LoopbackHub, files: dict[str, bytes]) -> None:
    server.add("org/torn", {PARTS[1]: files[PARTS[1]]})
    with pytest.raises(CheckpointError, match=r"lacks Q8_0/tiny-Q8_0-00001-of-00002\.gguf, a part of Q8_0"):
        planned("Q8_0", "org/torn")


@pytest.mark.parametrize("name", ["con-Q4_0/con.gguf", "a:b-Q4_0.gguf", "x-Q4_0 /y.gguf"])
def test_names_that_must_not_be_written(name: str, server: LoopbackHub, files: dict[str, bytes]) -> None:
    server.add("org/odd", {name: files["tiny-Q4_0.gguf"]})
    with pytest.raises(CheckpointError, match="nothing of this repository is written"):
        planned("Q4_0", "org/odd")


def test_names_that_some_systems_take_for_one(server: LoopbackHub, files: dict[str, bytes]) -> None:
    both = {"m-Q4_0.gguf": files["tiny-Q4_0.gguf"], "m-Q4_0.GGUF": files["tiny-Q4_0.gguf"], "m-Q8_0.gguf": files[PARTS[0]]}
    server.add("org/case", both)
    with pytest.raises(CheckpointError, match=r"'m-Q4_0\.GGUF', which differs from 'm-Q4_0\.gguf' in case only"):
        planned("m-Q4_0.GGUF", "org/case")
    assert planned("Q8_0", "org/case")[0].variant == "Q8_0", "what is not taken harms nobody"


def test_what_rimuru_cannot_run_is_an_objection(server: LoopbackHub, files: dict[str, bytes]) -> None:
    data = files["tiny-Q4_0.gguf"].replace(b"olmoe", b"gemma")
    server.add("org/odd", {"x-Q4_0.gguf": data})
    plan, _ = planned("Q4_0", "org/odd")
    assert len(plan.objections) == 1 and "'gemma' is not supported" in plan.objections[0].text
    pull("Q4_0", "org/odd")
    look = only("org/odd:Q4_0").inspection
    assert (look.status, look.architecture) == ("unusable", "gemma") and "is not supported" in str(look.why_not)


def test_damage_on_the_way_is_fetched_again(server: LoopbackHub, files: dict[str, bytes]) -> None:
    server.faults["tiny-Q4_0.gguf"] = [Fault("corrupt", at=9), Fault("close", at=5000)]
    pulled, _ = pull("Q4_0")
    assert pulled.path.read_bytes() == files["tiny-Q4_0.gguf"]


# ---- the library


def test_list_names_variants(server: LoopbackHub, files: dict[str, bytes]) -> None:
    pull("Q4_0")
    pull("Q8_0")
    models = {model.name: model for model in find_models()}
    assert set(models) == {f"{NAME}:Q4_0", f"{NAME}:Q8_0"}
    four, eight = models[f"{NAME}:Q4_0"], models[f"{NAME}:Q8_0"]
    assert (four.status, four.inspection.architecture, four.inspection.precision) == ("ready", "OlmoeForCausalLM", "Q4_0")
    assert four.size_bytes == len(files["tiny-Q4_0.gguf"]) and eight.size_bytes == sum(len(files[name]) for name in PARTS)
    assert four.inspection.config is not None and four.inspection.config.num_experts == 8
    eight.path.with_name(PARTS[1].rpartition("/")[2]).unlink()
    look = only(f"{NAME}:Q8_0").inspection
    assert look.status == "incomplete" and "00002-of-00002" in str(look.why_not)
    with pytest.raises(NotFoundError, match="not completely downloaded"):
        resolve_model(f"{NAME}:Q8_0")
    _, ear = pull("Q8_0")
    assert ear.files[PARTS[1]] in ("fetched", "present") and only(f"{NAME}:Q8_0").status == "ready"


@pytest.mark.parametrize("links", [True, False])
def test_what_another_tool_downloaded(links: bool, cache: Path, files: dict[str, bytes]) -> None:
    put_in_cache(cache, "org/theirs", {name: files[name] for name in ("tiny-Q4_0.gguf", *PARTS)}, links=links)
    assert {model.name for model in find_models()} == {"org/theirs:Q4_0", "org/theirs:Q8_0"}
    assert resolve_model("org/theirs:Q8_0").path.name == "tiny-Q8_0-00001-of-00002.gguf"
    result = verify_model("org/theirs:Q8_0")
    assert {file.name for file in result.files} == set(PARTS) and result.bad == ()
    shutil.rmtree(cache / "models--org--theirs")


def test_verify_compares_one_variant_or_all(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled, _ = pull("Q4_0")
    pull("Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    damage(pulled.path)
    assert verify_model(f"{NAME}:Q8_0").bad == ()
    for name in (f"{NAME}:q4_0", NAME):
        result = verify_model(name)
        assert [file.name for file in result.bad] == ["tiny-Q4_0.gguf"]
        assert f"rimuru pull {name}" in str(result.error().hint)  # type: ignore[union-attr]
    with pytest.raises(NotFoundError, match="not completely downloaded"):
        resolve_model(f"{NAME}:Q4_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    sent = server.sent()
    again, ear = pull("Q4_0")
    assert ear.files["tiny-Q4_0.gguf"] == "repaired" and server.sent() - sent >= again.path.stat().st_size
    assert verify_model(f"{NAME}:Q4_0").bad == ()


def test_show_before_and_after_a_download(server: LoopbackHub, files: dict[str, bytes]) -> None:
    afar = describe(open_source(f"{NAME}:Q8_0"))
    assert (afar["name"], afar["place"], afar["path"]) == (f"{NAME}:Q8_0", "hub", None)
    assert server.sent() <= sum(len(files[name]) for name in (*PARTS, "LICENSE"))
    pull("Q8_0")
    here = describe(open_source(f"{NAME}:Q8_0"))
    assert here["place"] == "cache" and here["path"].endswith("00001-of-00002.gguf")
    for key in ("architecture", "parameters", "experts", "bytes_by_part", "bytes", "licence"):
        assert here[key] == afar[key], key
    assert [file["name"] for file in here["files"]] == list(PARTS) and all(file["sha256"] for file in here["files"])
    assert sum(here["bytes_by_part"].values()) == here["bytes"] <= sum(len(files[name]) for name in PARTS)
    assert here["bytes_by_part"]["experts"] > here["bytes"] / 4


@pytest.mark.parametrize("links", [True, False])
def test_rm_of_one_variant_leaves_the_others(links: bool, cache: Path, files: dict[str, bytes]) -> None:
    snapshot = put_in_cache(cache, "org/theirs", {name: files[name] for name in ("tiny-Q4_0.gguf", *PARTS)}, links=links)
    planned_ = plan_removal("org/theirs:q8_0")
    assert planned_.freed_bytes == sum(len(files[name]) for name in PARTS) and planned_.kept_bytes == 0
    carry_out(planned_)
    assert [model.name for model in find_models()] == ["org/theirs:Q4_0"]
    assert (snapshot / "tiny-Q4_0.gguf").read_bytes() == files["tiny-Q4_0.gguf"]
    assert not (snapshot / PARTS[0]).exists() and not scan_cache_dir(cache).warnings
    with pytest.raises(NotFoundError, match=r"org/theirs:Q8_0 is not here; of this repository there is Q4_0"):
        plan_removal("org/theirs:Q8_0")
    carry_out(plan_removal("org/theirs:Q4_0"))
    assert not (cache / "models--org--theirs").exists()


def test_rm_forgets_what_was_pulled(cache: Path, files: dict[str, bytes]) -> None:
    pulled, _ = pull("Q4_0")
    pull("Q8_0")
    carry_out(plan_removal(f"{NAME}:Q4_0"))
    manifest = PullManifest.read(NAME, pulled.path.parent.name)
    assert manifest is not None and "tiny-Q4_0.gguf" not in manifest.files and PARTS[0] in manifest.files
    assert {model.name for model in find_models()} == {f"{NAME}:Q8_0"}
    assert resolve_model(NAME).name == f"{NAME}:Q8_0"
    pull("Q4_0")
    removal = plan_removal(NAME)
    assert {model.name for model in removal.models} == {f"{NAME}:Q4_0", f"{NAME}:Q8_0"}
    carry_out(removal)
    assert not (cache / "models--org--tiny-GGUF").exists() and PullManifest.all_of(NAME) == []


# ---- files and folders


def test_files_and_folders_on_the_disk(server: LoopbackHub, files: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "here" / "models"
    (folder / "split").mkdir(parents=True)
    (folder / "one").mkdir()
    for name in PARTS:
        (folder / "split" / name.rpartition("/")[2]).write_bytes(files[name])
    (folder / "one" / "tiny-Q4_0.gguf").write_bytes(files["tiny-Q4_0.gguf"])
    (folder / "one" / "mmproj-F16.gguf").write_bytes(files["mmproj-F16.gguf"])
    first = folder / "split" / "tiny-Q8_0-00001-of-00002.gguf"
    for typed in ("models/split", "models/split/tiny-Q8_0-00002-of-00002.gguf", str(first)):
        assert resolve_model(typed).path == first
    model = resolve_model("models/one/tiny-Q4_0.gguf")
    assert (model.name, model.revision, model.embedded) == ("tiny-Q4_0.gguf", None, False)
    facts = describe(open_source("models/one"))
    assert facts["name"] == "one" and [file["name"] for file in facts["files"]] == ["tiny-Q4_0.gguf"]
    result = verify_model("models/split")
    assert (result.against, result.bad, len(result.files)) == ("headers", (), 2)
    record_use(model.path)
    record_use(first)
    listed = {one.name: one for one in find_models() if one.kind == "folder"}
    assert set(listed) == {str(model.path), str(first)}
    assert listed[str(first)].size_bytes == sum(len(files[name]) for name in PARTS)
    with pytest.raises(UsageError, match="does not delete it"):
        plan_removal(str(first))
    first.with_name("tiny-Q8_0-00002-of-00002.gguf").unlink()
    assert [file.name for file in verify_model(str(first)).bad] == ["tiny-Q8_0-00002-of-00002.gguf"]
    (folder / "one" / "tiny-Q5_1.gguf").write_bytes(files["tiny-UD-Q5_1.gguf"])
    with pytest.raises(UsageError, match="several GGUF models"):
        resolve_model("models/one")
    (folder / "one" / "notes.txt").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="is a file; a model is a GGUF file, or a folder"):
        resolve_model("models/one/notes.txt")
