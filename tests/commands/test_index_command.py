"""``forage index`` as a user meets it: what goes together, what does not, what comes out."""

import json
from pathlib import Path

import pytest

from forage.commands.cli import main
from forage.data.corpus import write_corpus
from tests.retrieval.tiny_encoders import write_encoder
from tests.retrieval.vectors.test_build_dense import PASSAGES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c") / "corpus.jsonl"
    write_corpus(path, PASSAGES)
    return path


def manifest(directory: Path) -> dict[str, object]:
    return json.loads((directory / "manifest.json").read_text())


def test_bm25_takes_k1_and_b_and_their_defaults(texts: Path, tmp_path: Path):
    common = ["index", "--corpus", str(texts), "--backend", "bm25", "--out", str(tmp_path / "i")]
    assert main(common) == 0
    assert (manifest(tmp_path / "i")["k1"], manifest(tmp_path / "i")["b"]) == (0.9, 0.4)
    assert main([*common, "--k1", "1.2", "--b", "0"]) == 0
    assert (manifest(tmp_path / "i")["k1"], manifest(tmp_path / "i")["b"]) == (1.2, 0)


def test_vectors_are_built_with_what_was_said(texts: Path, model: Path, tmp_path: Path):
    argv = f"index --corpus {texts} --backend ivfpq --encoder {model} --out {tmp_path}/i"
    argv += " --lists 4 --probes 2 --code-bytes 8 --rescore int8 --candidates 50 --device cpu"
    argv += " --dtype float32 --pooling cls --no-normalise --max-length 32 --query-prefix ask:"
    assert main(argv.split()) == 0
    found = manifest(tmp_path / "i")
    assert found["faiss"] == {
        "kind": "ivfpq",
        "lists": 4,
        "probes": 2,
        "code_bytes": 8,
        "rescore": "int8",
        "candidates": 50,
    }
    encoder = found["encoder"]
    assert isinstance(encoder, dict)
    assert (encoder["pooling"], encoder["normalise"], encoder["max_length"]) == ("cls", False, 32)
    assert encoder["query_prefix"] == "ask:"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--backend flat", "vectors need an encoder: give --encoder"),
        ("--backend flat --encoder E --lists 4", "--lists is for ivf, ivfpq; the backend is flat"),
        ("--backend hnsw --encoder E --rescore int8", "--rescore is for sq8, pq, ivfpq"),
        ("--backend flat --encoder E --storage int8", "its int8 form is --backend sq8"),
        ("--backend flat --encoder E --k1 1", "--k1 has no effect here: the backend is flat"),
        ("--backend hnsw --encoder E --links 1", "--links: Input should be greater than or equal"),
        ("--encoder E", "--encoder has no effect here: the backend is bm25"),
        ("--no-normalise", "--normalise has no effect here: the backend is bm25"),
        ("--query-encoder Q", "--query-encoder has no effect here"),
        ("--restart", "--restart has no effect here: the backend is bm25"),
        ("--adopt F --encoder E --backend flat", "--backend has no effect here: --adopt takes"),
        ("--adopt F --encoder E --lists 3", "--lists has no effect here: --adopt takes"),
        ("--adopt F --encoder E --b 0", "--b has no effect here: --adopt takes"),  # 0 is False
        ("--adopt F", "vectors need an encoder"),
        ("--estimate", "--out has no effect here: --estimate builds nothing"),
        ("--backend faiss", "invalid choice: 'faiss'"),
    ],
)
def test_arguments_that_do_not_go_together_are_errors(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
):
    argv = ["index", "--corpus", str(texts), "--out", str(tmp_path / "i"), *words.split()]
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "i").exists()


def test_out_is_needed_to_build(texts: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["index", "--corpus", str(texts)]) == 2
    assert "required: --out" in capsys.readouterr().err


def test_an_estimate_names_every_backend_and_builds_nothing(
    texts: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    argv = f"index --corpus {texts} --encoder {model} --device cpu --dtype float32 --estimate"
    assert main(argv.split()) == 0
    out = capsys.readouterr().out
    assert "300 passages" in out
    for backend in ("bm25", "flat", "hnsw", "ivf", "sq8", "pq", "ivfpq"):
        assert f" {backend} " in out
    assert list(tmp_path.iterdir()) == []


def test_an_estimate_without_an_encoder_is_of_bm25(texts: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["index", "--corpus", str(texts), "--estimate"]) == 0
    out = capsys.readouterr().out
    assert "bm25" in out
    assert "flat" not in out


def test_an_index_is_adopted(texts: Path, model: Path, tmp_path: Path):
    build = f"index --corpus {texts} --backend flat --encoder {model} --out {tmp_path}/i"
    assert main(f"{build} --dtype float32 --device cpu".split()) == 0
    theirs = tmp_path / "i" / "vectors.faiss"
    adopt = f"index --corpus {texts} --adopt {theirs} --encoder {model} --out {tmp_path}/j"
    assert main(f"{adopt} --dtype float32 --device cpu".split()) == 0
    assert manifest(tmp_path / "j")["backend"] == "adopted"
