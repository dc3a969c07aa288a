"""The viewer: a run's records as read-only pages on this machine.

``forage view RUN_DIR`` serves it on the loopback interface. It follows a run that still trains. It
only reads the run's files, and computes no metric.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from pathlib import Path
from typing import Annotated

import uvicorn
import yaml
from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware
from tokenizers import Tokenizer

from forage.errors import UserError
from forage.records import EPISODES_FILE, METRICS_FILE, read_metrics
from forage.types import Status
from forage.viewer.episode_index import EpisodeFilter, EpisodeIndex
from forage.viewer.pages import content_security_policy, render_page
from forage.viewer.panels import health_charts, learning_charts
from forage.viewer.transcripts import Decode, view_question

LOG = logging.getLogger(__name__)

_ROWS_PER_PAGE = 50


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


def view(run_dir: Path, host: str = "127.0.0.1", port: int = 8100) -> None:
    """Serve the pages until interrupted; raises ``UserError`` for a bad host or a taken port."""
    if not _is_loopback(host):
        raise UserError(
            f"host {host} can be reached from other machines, and the viewer asks for no password: "
            "use 127.0.0.1, and from elsewhere a tunnel such as ssh -L 8100:127.0.0.1:8100"
        )
    app = create_app(run_dir)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from error
    shown_host = f"[{host}]" if ":" in host else host
    LOG.info("viewer of %s: http://%s:%d", run_dir, shown_host, listener.getsockname()[1])
    with listener:
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _page(template: str, status_code: int = 200, **values: object) -> HTMLResponse:
    html = render_page(template, **values).encode("utf-8", "replace")
    headers = {
        "Content-Security-Policy": content_security_policy(),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(html, status_code=status_code, headers=headers)
