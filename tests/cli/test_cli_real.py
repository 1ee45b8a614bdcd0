"""The command line over the real engine and a tiny random checkpoint: from words to tokens and back, and every kind of bad checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import write_tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from rimuru_cli.chat import loading
from rimuru_cli.chat.session import ChatSession
from rimuru_cli.main import main
from rimuru_cli.output import Output
from rimuru_cli.settings import resolve

Cli = Callable[..., tuple[int, str, str]]
# Large enough for the process with torch and for all experts; small enough for any machine.
ROOM = "4GiB"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-mixtral"
    write_tiny_checkpoint(folder, "mixtral", vocab_size=320)
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def answer(cli: Cli, *arguments: str) -> dict[str, Any]:
    code, out, err = cli("run", *arguments, "--json", "--memory", ROOM)
    assert (code, err) == (0, ""), out
    result: dict[str, Any] = json.loads(out)
    return result


def test_greedy_answers_repeat_and_raw_differs(cli: Cli, checkpoint: Path) -> None:
    flags = ("--temperature", "0", "--max-tokens", "6")
    first, second = (answer(cli, str(checkpoint), "Hi", *flags) for _ in range(2))
    assert first["token_ids"] == second["token_ids"] and first["model"] == "tiny-mixtral"
    assert first["prompt_tokens"] == len("|user\nHi|\n|assistant\n"), "each special token counts as one"
    assert answer(cli, str(checkpoint), "Hi", "--raw", *flags)["prompt_tokens"] == 2


def test_a_seed_repeats_sampling(cli: Cli, checkpoint: Path) -> None:
    flags = ("--temperature", "1", "--max-tokens", "8", "--top-p", "1", "--top-k", "0")
    one, again, other = (answer(cli, str(checkpoint), "Hi", *flags, "--seed", seed)["token_ids"] for seed in "223")
    assert one == again and one != other


def test_the_second_turn_reuses_the_first(checkpoint: Path) -> None:
    settings = resolve({"memory": ROOM, "temperature": "0", "max_tokens": "20"})
    with loading.opened_session(loading.load_model, str(checkpoint), settings, Output(json=True), banner=False) as session:
        cached = [ask(session, "A question that is longer than two blocks of the cache, surely.").timings.cached_tokens for _ in range(2)]
    assert cached[0] == 0 and cached[1] >= 64


def ask(session: ChatSession, question: str) -> Any:
    turn = session.ask(question, lambda: False)
    for _ in session.pieces(turn):
        pass
    return session.settle(turn)


def test_memory_below_the_floor_says_the_minimum(cli: Cli, checkpoint: Path) -> None:
    code, out, err = cli("run", str(checkpoint), "Hi", "--memory", "1MiB")
    assert (code, out) == (6, "") and "at least" in err and "--memory" in err


def test_a_prompt_longer_than_the_context_says_the_numbers(cli: Cli, checkpoint: Path) -> None:
    code, out, err = cli("run", str(checkpoint), "x" * 80, "--context", "50", "--memory", ROOM)
    assert (code, out) == (6, "") and "50" in err and str(80 + len("|user\n|\n|assistant\n")) in err


def test_not_a_model(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), str(tmp_path / "none"), "nobody/nothing"):
        code, out, err = cli("run", name, "Hi")
        assert (code, out) == (3, "") and "hint:" in err
        code, out, err = cli("run", name, "Hi", "--json")
        assert code == json.loads(out)["error"]["exit_code"] == 3 and err == ""


def test_pickled_weights_are_refused(cli: Cli, copy: Path) -> None:
    for weights in copy.glob("*.safetensors*"):
        weights.unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    code, out, err = cli("run", str(copy), "Hi")
    assert (code, out) == (1, "") and "pytorch_model.bin" in err and "refused" in err


def test_damaged_weights_are_named(cli: Cli, copy: Path) -> None:
    weights = next(iter(sorted(copy.glob("*.safetensors"))))
    weights.write_bytes(weights.read_bytes()[:-100])
    code, out, err = cli("run", str(copy), "Hi")
    assert (code, out) == (1, "") and weights.name in err


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for x in %}", "broken"),
        ("{{ messages.__class__.__mro__ }}", "sandbox"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}", "template"),
    ],
)
def test_bad_templates(template: str, words: str, cli: Cli, copy: Path) -> None:
    config = json.loads((copy / "tokenizer_config.json").read_text(encoding="utf-8"))
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}), encoding="utf-8")
    code, out, err = cli("run", str(copy), "Hi", "--memory", ROOM)
    assert code in (1, 2) and out == "" and words in err
    assert cli("run", str(copy), "Hi", "--raw", "--max-tokens", "2", "--memory", ROOM)[0] == 0


def test_profile_hotset_writes_reports_and_is_used(cli: Cli, checkpoint: Path, home: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "one"}', '"two"', '{"messages": [{"role": "user", "content": "three"}]}', '{"text": "four"}']
    prompts.write_text("\n".join(lines), encoding="utf-8")
    code, out, err = cli("profile-hotset", str(checkpoint), "--prompts", str(prompts), "--tokens", "4")
    assert code == 0 and out.splitlines()[0].split()[:2] == ["resident", "uniform"] and len(out.splitlines()) == 6
    (profile,) = (home / "data" / "profiles").iterdir()
    assert str(profile) in err and json.loads(profile.read_text(encoding="utf-8"))["model"] == "tiny-mixtral"
    with loading.opened_session(loading.load_model, str(checkpoint), resolve({"memory": ROOM}), Output(json=True), banner=False) as session:
        assert session.engine.info.profile == str(profile)
    with loading.opened_session(
        loading.load_model, str(checkpoint), resolve({"memory": ROOM, "profile": "none"}), Output(json=True), banner=False
    ) as session:
        assert session.engine.info.profile is None
    profile.write_text("{}", encoding="utf-8")
    assert "left out" in cli("run", str(checkpoint), "x", "--max-tokens", "1", "--memory", ROOM)[2]
    assert cli("run", str(checkpoint), "x", "--profile", str(profile), "--memory", ROOM)[0] == 2
    assert cli("run", str(checkpoint), "x", "--profile", "nowhere.json", "--memory", ROOM)[0] == 3


def test_profile_hotset_of_a_text_as_json(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("some words about nothing " * 30 for _ in range(4)), encoding="utf-8")
    code, out, err = cli("profile-hotset", str(checkpoint), "--text", str(text), "--output", str(tmp_path / "p.json"), "--json")
    report = json.loads(out)
    assert (code, err) == (0, "") and report["profile"] == str(tmp_path / "p.json") and (tmp_path / "p.json").is_file()
    assert [row["share"] for row in report["coverage"]] == [0.1, 0.25, 0.4, 0.5]


def test_profile_hotset_refuses_bad_texts_before_loading(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    for content, words in ((b"\xff", "byte 0"), (b"", "no prompts"), (b"{]", "line 1"), (b'{"x": 1}', "line 1"), (b'"one"', "only one")):
        file.write_bytes(content)
        code, out, err = cli("profile-hotset", "m", "--prompts", str(file))
        assert (code, out) == (2, "") and words in err, content
    assert cli("profile-hotset", "m", "--prompts", str(file), "--text", str(file))[0] == 2
    assert cli("profile-hotset", "m", "--prompts", str(tmp_path / "none"))[0] == 3
    assert cli("profile-hotset", "m", "--output", str(tmp_path / "no" / "p.json"))[0] == 2


def test_texts_are_cut_at_paragraphs_and_nothing_is_lost() -> None:
    from rimuru_cli.chat.profile import split_text

    text = "\n\n".join(["a" * 30, "b" * 30, "c" * 250, "d"])
    pieces = split_text(text, 100)
    assert "".join(pieces).replace("\n", "") == text.replace("\n", "") and all(len(piece) <= 100 for piece in pieces)
    assert pieces[0] == "a" * 30 + "\n\n" + "b" * 30


def test_the_built_in_prompts_are_many_and_different() -> None:
    from rimuru_cli.engine.experts.prompt_mix import PROMPT_MIX

    assert len(set(PROMPT_MIX)) == len(PROMPT_MIX) >= 20 and all(10 < len(prompt) < 200 for prompt in PROMPT_MIX)


def test_benches_print_tables_and_json(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from rimuru_cli.bench import allocator

    report = {"repeats": 2, "token_block_us": {"empty": {"median": 1.5, "p99": 2.0}}, "trace": {"operations": 10}}
    monkeypatch.setattr(allocator, "run_allocator_bench", lambda: report)
    code, out, err = cli("bench", "allocator")
    assert code == 0 and out.splitlines()[0].split() == ["token", "block", "us", "median", "p99"] and "operations 10" in err
    assert json.loads(cli("bench", "allocator", "--json")[1]) == report


def test_bench_decode_passes_its_flags(cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rimuru_cli.bench import decode

    seen: dict[str, Any] = {}

    def fake(model_dir: Path, **kwargs: Any) -> dict[str, Any]:
        seen.update(kwargs, model_dir=model_dir)
        return {"rows": [{"runner": "rimuru", "tokens_per_second": 5.0}, {"runner": "transformers", "ratio": 2.0}]}

    monkeypatch.setattr(decode, "run_decode_bench", fake)
    code, out, _ = cli("bench", "decode", str(checkpoint), "--vs", "transformers", "--tokens", "9", "--residency", "50%")
    assert code == 0 and out.splitlines()[0].split() == ["runner", "tokens", "per", "second", "ratio"]
    del seen["progress"]
    assert seen == {"model_dir": checkpoint, "versus": "transformers", "other": None, "tokens": 9, "residency": 0.5}
