"""The viewer: a run's records as read-only pages on this machine.

``forage view RUN_DIR`` serves it on the loopback interface. An index of the run's episodes is
extended as the files grow, so a run may still be training. Files are only read, and no metric is
computed here.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware
from tokenizers import Tokenizer

from forage.episode_json import EpisodeRecord, record_from_json
from forage.errors import UserError
from forage.records import EPISODES_FILE, METRICS_FILE, read_metrics
from forage.types import Status
from forage.viewer.pages import content_security_policy, render_page
from forage.viewer.panels import health_charts, learning_charts
from forage.viewer.transcripts import Decode, view_question

LOG = logging.getLogger(__name__)

_ROWS_PER_PAGE = 50


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode of the list; its line begins at byte ``offset`` of ``file``."""

    file: str
    offset: int
    step: int
    arm: str
    question_id: str
    question: str
    member: int
    num_hops: int | None
    status: str
    answer: str | None
    em: float | None
    reward: float | None
    num_searches: int


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes a list shows: each field as in the page's address, "" for all."""

    file: str = EPISODES_FILE
    step: str = ""
    arm: str = ""
    status: str = ""
    em: str = ""
    hops: str = ""

    def accepts(self, row: EpisodeRow) -> bool:
        em = "" if row.em is None else f"{row.em:g}"
        hops = "" if row.num_hops is None else str(row.num_hops)
        pairs = (
            (self.step.strip(), str(row.step)),
            (self.arm, row.arm),
            (self.status, row.status),
            (self.em, em),
            (self.hops, hops),
        )
        return all(wanted in ("", value) for wanted, value in pairs)


class EpisodeIndex:
    """The rows of every episode file of a run; several threads may use it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._rows: dict[str, list[EpisodeRow]] = {}
        self._inodes: dict[str, int] = {}
        self._read_to: dict[str, int] = {}

    def files(self) -> list[str]:
        """Paths of the episode files, relative to the run: the one of training first."""
        found = [*self._run_dir.glob("*.jsonl"), *self._run_dir.glob("evaluation/*.jsonl")]
        names = {path.relative_to(self._run_dir).as_posix() for path in found} - {METRICS_FILE}
        return sorted(names, key=lambda name: (name != EPISODES_FILE, name))

    def rows(self, wanted: EpisodeFilter) -> list[EpisodeRow]:
        """The rows that the filter accepts, in file order; none for an unknown file."""
        return [row for row in self._refreshed(wanted.file) if wanted.accepts(row)]

    def read(self, file: str, offset: int) -> EpisodeRecord | None:
        """The episode whose line begins at ``offset``; None if no listed line does."""
        if all(row.offset != offset for row in self._refreshed(file)):
            return None
        with (self._run_dir / file).open("rb") as stream:
            stream.seek(offset)
            return _record(file, offset, stream.readline())

    def _refreshed(self, file: str) -> list[EpisodeRow]:
        if file not in self.files():
            return []
        with self._lock:
            path = self._run_dir / file
            stat = path.stat()
            # A resumed run cuts its files, and an evaluation replaces its own: read those again.
            is_cut = stat.st_size < self._read_to.get(file, 0)
            if is_cut or self._inodes.get(file, stat.st_ino) != stat.st_ino:
                self._rows.pop(file, None)
                self._read_to.pop(file, None)
            self._inodes[file] = stat.st_ino
            rows = self._rows.setdefault(file, [])
            with path.open("rb") as stream:
                offset = stream.seek(self._read_to.get(file, 0))
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    record = _record(file, offset, line)
                    if record is not None:
                        rows.append(_row(file, offset, record))
                    offset += len(line)
            self._read_to[file] = offset
            return list(rows)


class RunPages:
    """The pages of one run; raises ``UserError`` where the directory holds no records."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._index = EpisodeIndex(run_dir)
        if not (run_dir / METRICS_FILE).exists() and not self._index.files():
            raise UserError(
                f"{run_dir} holds no records ({METRICS_FILE}, {EPISODES_FILE}): "
                "name the output_dir of a run"
            )
        self._decode = load_decoder(run_dir)

    def overview(self) -> HTMLResponse:
        """The charts of the run and its config."""
        rows = read_metrics(self._run_dir)
        config = self._run_dir / "config.yaml"
        return _page(
            "overview.html",
            name=self._run_dir.resolve().name,
            num_steps=len(rows),
            files=self._index.files(),
            learning=learning_charts(rows),
            health=health_charts(rows),
            config_yaml=config.read_text(encoding="utf-8") if config.exists() else "",
        )

    def episodes(
        self, request: Request, wanted: Annotated[EpisodeFilter, Depends()], page: int = 1
    ) -> HTMLResponse:
        """A list of the episodes that a filter accepts, page by page."""
        everything = self._index.rows(EpisodeFilter(file=wanted.file))
        rows = [row for row in everything if wanted.accepts(row)]
        num_pages = max(1, -(-len(rows) // _ROWS_PER_PAGE))
        page = min(max(page, 1), num_pages)
        return _page(
            "episodes.html",
            files=self._index.files(),
            wanted=wanted,
            statuses=[status.value for status in Status],
            arms=sorted({row.arm for row in everything if row.arm}),
            hops=sorted({str(row.num_hops) for row in everything if row.num_hops}),
            rows=rows[(page - 1) * _ROWS_PER_PAGE : page * _ROWS_PER_PAGE],
            num_rows=len(rows),
            num_all=len(everything),
            page=page,
            earlier=str(request.url.include_query_params(page=page - 1)) if page > 1 else "",
            later=str(request.url.include_query_params(page=page + 1)) if page < num_pages else "",
        )

    def episode(self, file: str, offset: int) -> HTMLResponse:
        """One episode, token by token, with links to the others of its question."""
        record = self._index.read(file, offset)
        if record is None:
            return _page("missing.html", status_code=404, file=file, offset=offset)
        played = record.episode
        siblings = [
            row
            for row in self._index.rows(EpisodeFilter(file=file, step=str(record.step)))
            if row.question_id == played.question.id
        ]
        label = f"Step {record.step}, member {played.member}"
        if record.arm:
            label += f", arm {record.arm.replace('_', ' ')}"
        return _page(
            "one_episode.html",
            question=view_question([(label, played)], self._decode),
            siblings=siblings,
            file=file,
            offset=offset,
            has_tokens=self._decode is not None,
        )


def create_app(run_dir: Path) -> FastAPI:
    """The viewer of one run; raises ``UserError`` where the directory holds no records."""
    pages = RunPages(run_dir)
    app = FastAPI(title="Forage viewer", docs_url=None, redoc_url=None, openapi_url=None)
    # A page elsewhere whose name resolves to this machine must not read the records.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    app.get("/")(pages.overview)
    app.get("/episodes")(pages.episodes)
    app.get("/episode")(pages.episode)
    return app


def load_decoder(run_dir: Path) -> Decode | None:
    """A function from token id to text, by the run's tokenizer; None if none is found.

    Looks in ``model/``, then in the newest directory of ``checkpoints/``, then at ``model.path`` of
    the run's config.
    """
    checkpoints = sorted(
        run_dir.glob("checkpoints/**/tokenizer.json"), key=lambda path: path.stat().st_mtime
    )
    places = [run_dir / "model" / "tokenizer.json", *reversed(checkpoints)]
    if (model := _model_path(run_dir)) is not None:
        places.append(model / "tokenizer.json")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        LOG.warning("no tokenizer.json in %s: episodes are shown as text, not tokens", run_dir)
        return None
    tokenizer = Tokenizer.from_file(str(path))

    def decode(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    return decode


def _model_path(run_dir: Path) -> Path | None:
    config = run_dir / "config.yaml"
    if not config.exists():
        return None
    tree = yaml.safe_load(config.read_text(encoding="utf-8"))
    model = tree.get("model") if isinstance(tree, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    return Path(path) if isinstance(path, str) else None


def _page(template: str, status_code: int = 200, **values: object) -> HTMLResponse:
    html = render_page(template, **values).encode("utf-8", "replace")
    headers = {
        "Content-Security-Policy": content_security_policy(),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(html, status_code=status_code, headers=headers)


def _record(file: str, offset: int, line: bytes) -> EpisodeRecord | None:
    try:
        return record_from_json(json.loads(line))
    except (KeyError, TypeError, ValueError) as error:
        LOG.warning("%s, byte %d: not an episode (%r), left out", file, offset, error)
        return None


def _row(file: str, offset: int, record: EpisodeRecord) -> EpisodeRow:
    episode = record.episode
    return EpisodeRow(
        file=file,
        offset=offset,
        step=record.step,
        arm=record.arm or "",
        question_id=episode.question.id,
        question=episode.question.text,
        member=episode.member,
        num_hops=episode.question.num_hops,
        status=episode.status.value,
        answer=episode.answer,
        em=episode.reward.parts.get("em") if episode.reward else None,
        reward=episode.reward.value if episode.reward else None,
        num_searches=episode.num_searches,
    )
