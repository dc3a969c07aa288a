"""Building an index of a corpus file: ``forage index`` compared with tantivy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.anchors.bench import Bench, Task
from benchmarks.anchors.passages import composition, write_passages
from benchmarks.anchors.side import Side, emptied
from benchmarks.anchors.talk import Talk


def measure(bench: Bench) -> None:
    size = bench.pick(200_000, 1_000_000)
    corpus = write_passages(bench.folder, size)
    arguments = {"corpus": str(corpus), "num_passages": size}
    ours = Side(
        "forage index",
        "benchmarks.anchors.build:build_with_forage",
        f"`forage index` (language auto), the whole command with its start: all cores, the copy of "
        f"the passages, hashes and manifest; {composition(size)}",
        {**arguments, "out": str(bench.folder / "built-forage")},
        program="forage",
    )
    theirs = Side(
        "tantivy",
        "benchmarks.anchors.build:build_with_tantivy",
        "its own `default` tokenizer on title and text, both and the id stored, 2 writer threads, "
        "1 GB heap, until all merges are done; lines parsed with `json`",
        {**arguments, "out": str(bench.folder / "built-tantivy")},
        ("tantivy",),
    )
    bench.race(ours, [theirs], [Task(f"{size:,} passages", "passages/s", {"tantivy": 1.0})])


def build_with_forage(talk: Talk, corpus: str, num_passages: int, out: str) -> None:
    talk.ready()
    for _ in talk.requests():
        folder = emptied(Path(out))
        command = [sys.executable, "-m", "forage", "index", "--corpus", corpus]
        command += ["--out", str(folder / "index")]
        started = time.perf_counter()
        subprocess.run(command, check=True)
        talk.reply(value=num_passages / (time.perf_counter() - started))


def build_with_tantivy(talk: Talk, corpus: str, num_passages: int, out: str) -> None:
    import tantivy

    from forage.data.corpus import parse_contents

    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    for name in ("title", "text"):
        builder.add_text_field(name, stored=True, index_option="freq")
    schema = builder.build()
    talk.ready()
    for _ in talk.requests():
        folder = emptied(Path(out))
        started = time.perf_counter()
        index = tantivy.Index(schema, path=str(folder))
        writer = index.writer(1_000_000_000, num_threads=2)
        with open(corpus, encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                title, text = parse_contents(row["contents"])
                writer.add_document(tantivy.Document(id=row["id"], title=title, text=text))
        writer.commit()
        writer.wait_merging_threads()
        talk.reply(value=num_passages / (time.perf_counter() - started))
