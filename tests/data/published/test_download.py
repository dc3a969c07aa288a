"""Files over real HTTP: interrupted, resumed, verified; then indexed and searched."""

import gzip
import json
import random
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from forage.commands.cli import main
from forage.data.published.download import Piece, download
from forage.data.published.published_corpora import fetch
from forage.errors import UserError
from forage.retrieval.index.index import build_index, open_index
from tests.data.hub_server import COMMIT, Hub

CONTENT = random.Random(0).randbytes(300_000)


def piece(hub: Hub, content: bytes, name: str = "f.bin") -> Piece:
    return Piece(f"{hub.url}/file/{name}", len(content), sha256(content).hexdigest())


def test_a_file_arrives_whole_and_is_not_fetched_twice(tmp_path: Path):
    with Hub({"f.bin": CONTENT}) as hub:
        counted: list[int] = []
        download([piece(hub, CONTENT)], tmp_path / "f.bin", counted.append)
        download([piece(hub, CONTENT)], tmp_path / "f.bin", counted.append)
        assert hub.ranges == ["bytes=0-"]
    assert (tmp_path / "f.bin").read_bytes() == CONTENT
    assert sum(counted) == 2 * len(CONTENT)
    assert list(tmp_path.iterdir()) == [tmp_path / "f.bin"]


def test_a_connection_that_breaks_is_taken_up_at_the_byte_where_it_broke(tmp_path: Path):
    with Hub({"f.bin": CONTENT}, cut_after=[1000, 0, 99_000]) as hub:
        download([piece(hub, CONTENT)], tmp_path / "f.bin", first_wait_s=0)
        assert hub.ranges == ["bytes=0-", "bytes=1000-", "bytes=1000-", "bytes=100000-"]
    assert (tmp_path / "f.bin").read_bytes() == CONTENT


def test_a_run_that_was_stopped_goes_on_with_what_lies_on_the_disk(tmp_path: Path):
    (tmp_path / "f.bin.partial").write_bytes(CONTENT[:123_456])
    with Hub({"f.bin": CONTENT}) as hub:
        download([piece(hub, CONTENT)], tmp_path / "f.bin")
        assert hub.ranges == ["bytes=123456-"]
    assert (tmp_path / "f.bin").read_bytes() == CONTENT


def test_a_server_that_knows_no_ranges_is_read_from_the_start(tmp_path: Path):
    (tmp_path / "f.bin.partial").write_bytes(CONTENT[:123_456])
    with Hub({"f.bin": CONTENT}, knows_ranges=False, cut_after=[200_000]) as hub:
        download([piece(hub, CONTENT)], tmp_path / "f.bin", first_wait_s=0)
    assert (tmp_path / "f.bin").read_bytes() == CONTENT


def test_a_passing_refusal_is_tried_again_and_a_lasting_one_is_told(tmp_path: Path):
    with Hub({"f.bin": CONTENT}, statuses=[503, 429]) as hub:
        download([piece(hub, CONTENT)], tmp_path / "f.bin", first_wait_s=0)
    with (
        Hub({"f.bin": CONTENT}, statuses=[403]) as hub,
        pytest.raises(UserError, match="the server answers 403"),
    ):
        download([piece(hub, CONTENT)], tmp_path / "g.bin", first_wait_s=0)


def test_a_server_that_brings_nothing_is_given_up_and_what_came_is_kept(tmp_path: Path):
    with (
        Hub({"f.bin": CONTENT}, cut_after=[5000, 0, 0, 0, 0, 0, 0]) as hub,
        pytest.raises(UserError, match="the connection ended early, 6 times in a row; received"),
    ):
        download([piece(hub, CONTENT)], tmp_path / "f.bin", first_wait_s=0)
    assert (tmp_path / "f.bin.partial").read_bytes() == CONTENT[:5000]


def test_a_dead_server_is_an_error_with_its_address(tmp_path: Path):
    with Hub({}) as hub:
        gone = piece(hub, CONTENT)
    with pytest.raises(UserError, match=r"file/f\.bin: .*refused.*6 times in a row"):
        download([gone], tmp_path / "f.bin", first_wait_s=0)


@pytest.mark.parametrize("num_there", [0, 50_000])
def test_a_file_that_is_not_what_was_published_is_removed(tmp_path: Path, num_there: int):
    other = bytes(num_there) + CONTENT[num_there:]
    (tmp_path / "f.bin.partial").write_bytes(other[:num_there])
    with (
        Hub({"f.bin": CONTENT[:-1] + b"x" if not num_there else CONTENT}) as hub,
        pytest.raises(UserError, match="its checksum is .*, but the published one is"),
    ):
        download([piece(hub, CONTENT)], tmp_path / "f.bin")
    assert (tmp_path / "f.bin.partial").read_bytes() == b""
    assert not (tmp_path / "f.bin").exists()


def test_what_is_left_of_a_longer_file_is_not_taken_for_this_one(tmp_path: Path):
    """All its pieces counted as verified, and the beginning of the other file got its name."""
    (tmp_path / "f.bin.partial").write_bytes(bytes(len(CONTENT) + 1))
    with Hub({"f.bin": CONTENT}) as hub:
        download([piece(hub, CONTENT)], tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == CONTENT


def test_another_file_in_the_way_is_not_touched(tmp_path: Path):
    (tmp_path / "f.bin").write_text("mine")
    with (
        Hub({"f.bin": CONTENT}) as hub,
        pytest.raises(UserError, match="already exists with 4 bytes"),
    ):
        download([piece(hub, CONTENT)], tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_text() == "mine"


def test_pieces_are_put_together_while_they_arrive(tmp_path: Path):
    first, second = CONTENT[:100_000], CONTENT[100_000:]
    with Hub({"a": first, "b": second}, cut_after=[40_000]) as hub:
        pieces = [piece(hub, first, "a"), piece(hub, second, "b")]
        download(pieces, tmp_path / "whole", first_wait_s=0)
    assert (tmp_path / "whole").read_bytes() == CONTENT


@pytest.mark.parametrize("num_there", [99_999, 100_000, 100_001, 299_999, 300_000])
def test_pieces_are_resumed_wherever_the_last_run_stopped(tmp_path: Path, num_there: int):
    (tmp_path / "whole.partial").write_bytes(CONTENT[:num_there])
    first, second = CONTENT[:100_000], CONTENT[100_000:]
    with Hub({"a": first, "b": second}) as hub:
        download([piece(hub, first, "a"), piece(hub, second, "b")], tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == CONTENT


# Published corpora, from a hub.

PASSAGES = [
    {"id": str(i), "contents": f'"Town {i}"\nTown {i} lies on the river {word}.'}
    for i, word in enumerate(["Tiber", "Seine", "Spree", "Arno"])
]
LINES = [json.dumps(row).encode() + b"\n" for row in PASSAGES]
CORPUS = gzip.compress(b"".join(LINES), mtime=0)


def test_a_corpus_comes_from_the_hub_at_one_commit_and_is_indexed_as_it_is(tmp_path: Path):
    files = {"wiki-18.jsonl.gz": CORPUS, "README.md": b"a card", ".gitattributes": b"*"}
    out = tmp_path / "wiki"
    with Hub(files, page_size=2) as hub:
        paths = fetch("wiki-18", out, hub.url, None, None)
        assert fetch("wiki-18", out, hub.url, None, None) == paths
    assert paths == [out / "wiki-18.jsonl.gz"]
    source = json.loads((out / "source.json").read_text())
    assert (source["hub_id"], source["commit"]) == ("PeterJinGo/wiki-18-corpus", COMMIT)
    for corpus in (paths[0], out):  # the file, or the directory that it came into
        build_index(corpus, tmp_path / "index", show_progress=False)
        with open_index(tmp_path / "index") as index:
            (hits,) = index.search(["river Seine"], 1)
        assert hits[0].passage.title == "Town 1"


def test_an_index_in_parts_becomes_one_file(tmp_path: Path):
    with Hub({"part_aa": CONTENT[:9999], "part_ab": CONTENT[9999:]}) as hub:
        (path,) = fetch("wiki-18-e5", tmp_path, hub.url, None, None)
    assert path == tmp_path / "e5_Flat.index"
    assert path.read_bytes() == CONTENT


def test_a_small_file_is_checked_by_gits_hash(tmp_path: Path):
    with Hub({"segments_1": b"lucene"}, plain=("segments_1",)) as hub:
        (path,) = fetch("wiki-18-bm25", tmp_path, hub.url, None, None)
    assert path.read_bytes() == b"lucene"
    with (
        Hub({"s": b"lucenE"}, plain=("s",), published={"s": b"lucene"}) as hub,
        pytest.raises(UserError, match="its checksum"),
    ):
        fetch("wiki-18-bm25", tmp_path / "other", hub.url, None, None)


def test_a_directory_of_another_corpus_is_refused(tmp_path: Path):
    with Hub({"wiki-18.jsonl.gz": CORPUS}) as hub:
        fetch("wiki-18", tmp_path, hub.url, None, None)
        with pytest.raises(UserError, match="contains PeterJinGo/wiki-18-corpus at main, not incl"):
            fetch("asearcher", tmp_path, hub.url, None, None)
        with pytest.raises(UserError, match="at main, not .* at v2; choose another --out"):
            fetch("wiki-18", tmp_path, hub.url, "v2", None)


@pytest.mark.parametrize("text", ["", '{"hub": "x"', "[]", "{}"])
def test_a_note_of_the_commit_that_cannot_be_read_is_told(tmp_path: Path, text: str):
    """A run that was killed while it wrote the note could not go on: a traceback."""
    (tmp_path / "source.json").write_text(text)
    with (
        Hub({"wiki-18.jsonl.gz": CORPUS}) as hub,
        pytest.raises(UserError, match=r"source\.json does not say .* remove that file"),
    ):
        fetch("wiki-18", tmp_path, hub.url, None, None)


@pytest.mark.parametrize("reply", [{}, [], {"sha": COMMIT, "error": "no listing"}])
def test_a_mirror_that_answers_otherwise_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: object
):
    monkeypatch.setattr("tests.data.hub_server.Hub._answer_api", partial(_answer_json, reply))
    with Hub({}) as hub, pytest.raises(UserError, match="does not answer like the hub"):
        fetch("wiki-18", tmp_path, hub.url, None, None)


def _answer_json(reply: object, request: BaseHTTPRequestHandler, *_: object) -> None:
    body = json.dumps(reply).encode()
    request.send_response(200)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def test_an_address_that_is_none_is_told(tmp_path: Path):
    for address in ("http://[::1/c.jsonl", "http://a:b/c.jsonl"):
        with pytest.raises(UserError, match="is not the address|cannot reach"):
            fetch(address, tmp_path, None, None, "0" * 64)


def test_a_listing_that_leads_outside_is_refused(tmp_path: Path):
    with (
        Hub({"../evil": b"x"}) as hub,
        pytest.raises(UserError, match="lists a file outside its own folder"),
    ):
        fetch("wiki-18", tmp_path, hub.url, None, None)


def test_the_command_fetches_an_address_with_its_checksum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    digest = sha256(CORPUS).hexdigest()
    with Hub({"c.jsonl.gz": CORPUS}) as hub:
        argv = ["data", "corpus", f"{hub.url}/file/c.jsonl.gz", "--out", str(tmp_path)]
        assert main([*argv, "--sha256", digest]) == 0
        assert (tmp_path / "c.jsonl.gz").read_bytes() == CORPUS
        assert main(argv) == 2
        assert "the 64 hexadecimal digits of the file are needed" in capsys.readouterr().err
        assert main([*argv, "--sha256", digest, "--revision", "main"]) == 2
    assert main(["data", "corpus", "wiki-19", "--out", str(tmp_path)]) == 2
    assert "no corpus 'wiki-19'; choose one of wiki-18" in capsys.readouterr().err
    gone = ["data", "corpus", "wiki-18", "--out", str(tmp_path / "x"), "--hub", hub.url]
    assert main(gone) == 2
    assert "if the hub cannot be reached, name a mirror with --hub" in capsys.readouterr().err
