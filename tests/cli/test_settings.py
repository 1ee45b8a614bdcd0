"""Settings: who wins, what is refused and by which name, sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru_cli.settings import SETTINGS, MemorySize, describe, parse_share, parse_size, parse_switch, read_file, resolve
from rimuru_models.errors import UsageError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "config.toml", 'temperature = 0.1\ntop_k = 10\nmemory = "4GiB"\n')
    environ = {"RIMURU_TEMPERATURE": "0.2", "RIMURU_TOP_K": "20"}
    settings = resolve({"temperature": "0.3"}, file=file, environ=environ)
    assert (settings["temperature"], settings["top_k"], settings["memory"], settings["min_p"]) == (0.3, 20, MemorySize(4 << 30), None)
    origins = [(settings.origins[n].source, settings.origins[n].where) for n in ("temperature", "top_k", "memory", "min_p")]
    assert origins == [("flag", "--temperature"), ("variable", "RIMURU_TOP_K"), ("file", str(file)), ("default", None)]
    assert settings.sampling() == {"temperature": 0.3, "top_k": 20}


def test_every_setting_can_come_from_each_place(tmp_path: Path) -> None:
    values = {"model": "m", "memory": "50%", "system": "s", "think": "on", "profile": "p", "kv": "q8", "quant": "int4"}
    for setting in SETTINGS:
        value = values.get(setting.name, "1")
        assert resolve({}, file=tmp_path / "none", environ={setting.variable: value}).origins[setting.name].source == "variable"
        quoted = f'"{value}"' if setting.name in values else value
        file = write(tmp_path / "c.toml", f"{setting.name} = {quoted}\n")
        assert resolve({}, file=file, environ={}).origins[setting.name].source == "file"


def test_zero_and_false_are_values_and_an_empty_variable_is_none(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "think = false\ntop_k = 0\n")
    settings = resolve({"temperature": 0.0}, file=file, environ={"RIMURU_THINK": ""})
    assert settings["think"] is False and settings["top_k"] == 0 and settings["temperature"] == 0.0
    assert resolve({"think": False}, file=tmp_path / "none", environ={"RIMURU_THINK": "1"})["think"] is False


def test_the_file_of_the_isolated_home_is_used(home: Path) -> None:
    (home / "config").mkdir(parents=True)
    write(home / "config" / "config.toml", "seed = 7\n")
    assert resolve({})["seed"] == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("top_p", "1.5"),
        ("top_k", "2.5"),
        ("top_k", "-1"),
        ("min_p", "2"),
        ("seed", "9223372036854775808"),
        ("seed", "9" * 5000),
        ("max_tokens", "0"),
        ("context", "0"),
        ("memory", "lots"),
        ("think", "maybe"),
        ("repetition_penalty", "0"),
    ],
)
def test_a_wrong_value_names_its_place(name: str, value: str, tmp_path: Path) -> None:
    flag, variable = "--" + name.replace("_", "-"), "RIMURU_" + name.upper()
    with pytest.raises(UsageError, match=flag):
        resolve({name: value}, file=tmp_path / "none", environ={})
    with pytest.raises(UsageError, match=variable):
        resolve({}, file=tmp_path / "none", environ={variable: value})
    file = write(tmp_path / "c.toml", f'{name} = "{value}"\n')
    with pytest.raises(UsageError, match=r"c\.toml"):
        resolve({}, file=file, environ={})


@pytest.mark.parametrize("line", ["temperature = true", "memory = 1.5", "memory = true", "system = 3", "top_k = [1]", "seed = {}"])
def test_wrong_types_in_the_file(line: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"c\.toml"):
        resolve({}, file=write(tmp_path / "c.toml", line + "\n"), environ={})


def test_unknown_keys_are_reported_and_dashes_are_fine(tmp_path: Path) -> None:
    known, warnings = read_file(write(tmp_path / "c.toml", "top-k = 3\ntemprature = 1\n[tui]\nx = 1\n"))
    assert known == {"top_k": 3}
    assert len(warnings) == 2
    assert "'temprature'" in warnings[0] and "'temperature'" in warnings[0] and "'tui'" in warnings[1]


@pytest.mark.parametrize("raw", [b"top_k = ", b"\xff = 1", b"a = 1\na = 2", b"x = " + b"9" * 5000])
def test_a_broken_file_is_named(raw: bytes, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(raw)
    with pytest.raises(UsageError, match=r"c\.toml"):
        read_file(file)


def test_no_file_is_fine_and_a_folder_is_not(tmp_path: Path) -> None:
    assert read_file(tmp_path / "none" / "c.toml") == ({}, ())
    with pytest.raises(UsageError):
        read_file(tmp_path)


def test_describe_is_plain_data(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in describe(resolve({"memory": "2KiB", "think": True}, file=tmp_path / "n", environ={}))}
    assert rows["memory"]["value"] == 2048 and rows["think"]["shown"] == "on"
    assert rows["top_p"]["value"] is None and rows["top_p"]["source"] == "default" and rows["top_p"]["variable"] == "RIMURU_TOP_P"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", MemorySize(8 << 30)),
        ("8GB", MemorySize(8 * 10**9)),
        ("8g", MemorySize(8 << 30)),
        (" 1.5 MiB ", MemorySize(3 << 19)),
        (".5k", MemorySize(512)),
        ("12345", MemorySize(12345)),
        (12345, MemorySize(12345)),
        ("100b", MemorySize(100)),
        ("50%", MemorySize(share=0.5)),
        ("100 %", MemorySize(share=1.0)),
        ("9007199254740993", MemorySize(2**53 + 1)),
    ],
)
def test_sizes(text: str | int, size: MemorySize) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "8 GiBs",
        "-1",
        "0",
        "0%",
        "101%",
        "1e9",
        "8,5GB",
        "8GiB9",
        "nan",
        "inf",
        "٣GB",
        "1" * 40,
        "9999999TiB",
        "0.1b",
        "1.2.3",
        "%",
    ],
)
def test_nonsense_is_not_a_size(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@given(st.integers(1, 1 << 60))
def test_every_whole_number_of_bytes_is_exact(num_bytes: int) -> None:
    assert parse_size(str(num_bytes)) == MemorySize(num_bytes) == parse_size(str(MemorySize(num_bytes)))


@given(st.integers(1, 1000), st.sampled_from("kmg"))
def test_units_agree_with_each_other(number: int, prefix: str) -> None:
    binary = parse_size(f"{number}{prefix}iB").num_bytes
    decimal = parse_size(f"{number}{prefix.upper()}B").num_bytes
    assert binary == parse_size(f"{number}{prefix}").num_bytes
    assert binary is not None and decimal is not None and decimal < binary
    assert parse_size(f"{number / 10}{prefix}").of(0) == int(number / 10 * 1024 ** ("kmg".index(prefix) + 1))


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    try:
        size = parse_size(text)
    except UsageError:
        return
    assert (size.num_bytes is None) != (size.share is None)
    assert size.of(1 << 30) >= 0


@given(st.floats(0.01, 100))
def test_shares_of_a_device(percent: float) -> None:
    size = parse_size(f"{percent:.2f}%")
    assert size.of(1 << 34) == pytest.approx((1 << 34) * percent / 100, rel=0.01, abs=(1 << 34) / 1e4)


def test_shares_and_switches() -> None:
    assert parse_share("50%", "--x") == parse_share("0.5", "--x") == 0.5
    for text in ("0", "101%", "half", "nan", "", "-5%"):
        with pytest.raises(UsageError, match="--x"):
            parse_share(text, "--x")
    assert [parse_switch(x) for x in ("ON", "0", True)] == [True, False, True]
