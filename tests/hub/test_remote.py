"""Addresses: where the token goes, which redirects are followed, and what the hub may say about itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from loopback_hub import GOOD_TOKEN, LoopbackHub
from loopback_models import model_files
from loopback_setup import connect

from rimuru_cli.hub import patience, remote
from rimuru_cli.hub.patience import Cancelled, UnreachableError
from rimuru_cli.hub.remote import Hub
from rimuru_models.errors import RimuruError, UsageError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub(store=True) as hub:
        hub.add("org/name", model_files())
        connect(monkeypatch, hub, tmp_path / "hub", read_seconds=1)
        monkeypatch.setattr(patience, "FIRST_WAIT_SECONDS", 0.001)
        yield hub


@pytest.mark.parametrize(
    ("start", "location"),
    [
        ("https://hub.example/a", "http://hub.example/a"),
        ("https://hub.example/a", "file:///etc/passwd"),
        ("http://hub.example/a", "ftp://x/y"),
        ("http://hub.example/a", "javascript:alert(1)"),
    ],
)
def test_redirects_that_are_not_followed(start: str, location: str) -> None:
    with pytest.raises(RimuruError, match="not safe"):
        remote._next_hop(start, location)


def test_redirects_that_are_followed() -> None:
    assert remote._next_hop("https://hub.example/org/old", "/org/new") == "https://hub.example/org/new"
    assert remote._next_hop("http://hub.example/a", "https://hub.example/a") == "https://hub.example/a"
    assert remote._next_hop("https://hub.example/a", "https://cdn.example/b?x=1") == "https://cdn.example/b?x=1"


def test_another_port_and_another_spelling_are_another_host() -> None:
    same = remote._origin("https://Hub.Example:443/x")
    assert same == remote._origin("https://hub.example/y") == ("https", "hub.example", 443)
    assert len({remote._origin(url) for url in ("http://a", "https://a", "http://a:81", "http://b", "http://a:99999999")}) == 5
    assert remote._host("https://user:secret@hub.example:8080/x") == "hub.example:8080"


def test_questions_that_are_sent_elsewhere_leave_the_token_behind(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    server.add("org/old", {}, renamed_to="org/name")
    assert Hub().info("org/old", "main").repository == "org/name"
    assert [request.headers["authorization"] for request in server.log] == [f"Bearer {GOOD_TOKEN}"] * 2
    server.log.clear()
    # The store answers questions, too: it is the hub here, and sends its own question on to the other port.
    monkeypatch.setattr(constants, "ENDPOINT", server.store_url)
    server.repositories["org/old"].renamed_to = "org/name"
    server.elsewhere = server.url
    assert Hub().info("org/old", "main").repository == "org/name"
    assert [(request.server, "authorization" in request.headers) for request in server.log] == [("store", True), ("hub", False)]


def test_circles_end(server: LoopbackHub) -> None:
    server.add("org/a", {}, renamed_to="org/b")
    server.add("org/b", {}, renamed_to="org/a")
    with pytest.raises(UnreachableError, match="in circles"):
        Hub().info("org/a", "main")
    assert len(server.log) <= 40


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"id": "org/name"},
        {"id": "org/name", "sha": "main"},
        {"id": "org/name", "sha": "../../../../etc"},
        {"id": "../../x", "sha": "0" * 40},
        {"id": "org/../x", "sha": "0" * 40},
        {"id": "a--b/c", "sha": "0" * 40},
        {"id": 3, "sha": "0" * 40},
        {"id": "org/name/more", "sha": "0" * 40},
    ],
)
def test_impossible_repositories(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(Hub, "_json", lambda self, url, asked: (answer, None))
    with pytest.raises(RimuruError, match="does not answer like"):
        Hub().info("org/name", "main")


@pytest.mark.parametrize(
    "entry", [3, {}, {"path": "x"}, {"path": 3, "size": 3, "oid": "0" * 40}, {"path": "x", "size": True, "oid": "0" * 40}]
)
def test_impossible_files(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, entry: Any) -> None:
    monkeypatch.setattr(Hub, "_json", lambda self, url, asked: ([entry], None))
    with pytest.raises(RimuruError, match="does not answer like"):
        Hub().tree("org/name", "0" * 40)


def test_another_commit_than_the_one_asked_for(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "_json", lambda self, url, asked: ({"id": "org/name", "sha": "1" * 40}, None))
    assert Hub().info("org/name", "main").commit == "1" * 40
    with pytest.raises(RimuruError, match="another commit"):
        Hub().info("org/name", "2" * 40)


def test_folders_and_submodules_are_no_files(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        {"type": "directory", "path": "onnx", "oid": "0" * 40},
        {"type": "commit", "path": "sub", "oid": "0" * 40},
        {"type": "file", "path": "x", "size": 1, "oid": "0" * 40},
    ]
    monkeypatch.setattr(Hub, "_json", lambda self, url, asked: (entries, None))
    assert [file.name for file in Hub().tree("org/name", "0" * 40)] == ["x"]


def test_a_tree_without_end(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"path": "x", "size": 1, "oid": "0" * 40}
    monkeypatch.setattr(Hub, "_json", lambda self, url, asked: ([entry] * 1000, url))
    with pytest.raises(RimuruError, match="more than 100000 files"):
        Hub().tree("org/name", "0" * 40)


def test_an_answer_without_end(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MOST_JSON_BYTES", 100)
    with pytest.raises(RimuruError, match="does not end"):
        Hub().tree("org/name", server.repositories["org/name"].refs["main"])


def test_cancelled_before_a_question(server: LoopbackHub) -> None:
    hub = Hub()
    hub.cancelled.set()
    with pytest.raises(Cancelled):
        hub.info("org/name", "main")
    assert not server.log


def test_a_hub_that_goes_silent(server: LoopbackHub) -> None:
    from loopback_hub import Fault

    server.api_faults = [Fault("stall", seconds=1.3)]
    notices: list[str] = []
    assert Hub(notice=notices.append).info("org/name", "main").repository == "org/name"
    assert "has stopped answering" in notices[0]


def test_a_socks_proxy_that_nobody_here_can_speak_to(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import _http

    def no_socks() -> None:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed. Make sure to install httpx using ...")

    monkeypatch.setattr(_http, "get_session", no_socks)
    monkeypatch.setenv("ALL_PROXY", "socks5://user:secret@127.0.0.1:1080")
    with pytest.raises(UsageError, match="SOCKS proxy") as caught:
        Hub().info("org/name", "main")
    assert "ALL_PROXY" in str(caught.value.hint) and "secret" not in f"{caught.value.what} {caught.value.hint}"


def test_a_proxy_that_may_be_to_blame_is_named(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@127.0.0.1:9")
    server.close()
    with pytest.raises(UnreachableError, match="cannot be reached") as caught:
        Hub(wait=lambda seconds: False).info("org/name", "main")
    assert "HTTPS_PROXY" in str(caught.value.hint) and "secret" not in str(caught.value.hint)
