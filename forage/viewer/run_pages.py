"""The pages of runs: the table with overlaid curves, one run, and the data behind charts."""

from __future__ import annotations

import csv
import io
import logging
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from forage.errors import UserError
from forage.evaluation.report.figure_table import to_latex
from forage.viewer.charts import SMOOTHING, Series, line_chart
from forage.viewer.group_curves import group_series
from forage.viewer.library import Library, ShownRun
from forage.viewer.metric_words import MetricWords, words_of
from forage.viewer.panels import HEADLINE_METRICS, health_charts, learning_charts
from forage.viewer.run_facts import RunFacts, differing_settings, facts_of, sign_states
from forage.viewer.run_tables import groups_of_runs, groups_table, order_of, runs_table
from forage.viewer.viewer_page import viewer_page

LOG = logging.getLogger(__name__)

_MAX_SETTINGS = 6
_LONG = 24
"""Settings with values at least this long get no column in the table, and neither do paths."""
_NUM_CHOSEN = 6
"""The number of newest runs whose curves are shown first."""
_MOST_POINTS = 20_000
"""Maximum points of a curve that readers can zoom into."""

Metric = tuple[str, MetricWords | None]
"""A metric, and the words about it if docs/metrics.md lists it."""
Keys = Annotated[list[str], Query(default_factory=list)]
Smoothing = Annotated[float, Query(ge=0, le=0.5)]


class RunPages:
    def __init__(self, library: Library) -> None:
        self._library = library

    def first(self) -> HTMLResponse:
        """The run's page if there is only one run, otherwise the table."""
        runs = self._library.runs()
        return self.run(runs[0].key) if len(runs) == 1 else self.runs()

    def runs(self, sort: str = "", groups: bool = False) -> HTMLResponse:
        """The table of runs and their curves; with ``groups``, a curve per group of runs."""
        facts, errors = self._facts()
        runs = [each.run for each in facts]
        newest = sorted(facts, key=lambda each: (bool(each.num_steps), each.changed), reverse=True)
        chosen = [each.run.key for each in newest[:_NUM_CHOSEN] if each.num_steps]
        columns, more_settings = _columns(runs)
        members = groups_of_runs(runs)
        numbers = {key: n for n, keys in enumerate(members.values()) for key in keys}
        if groups:  # whole groups, as in the page's script
            wanted = {numbers[key] for key in chosen}
            chosen = [f.run.key for f in facts if f.num_steps and numbers[f.run.key] in wanted]
        order = order_of(facts, columns, sort)
        return viewer_page(
            "runs.html",
            here="runs",
            rows=[(n, facts[n], numbers[facts[n].run.key]) for n in order],
            facts=facts,
            errors=errors,
            chosen=chosen,
            settings=columns,
            more_settings=more_settings,
            sections=self._sections(runs),
            sort=sort,
            groups=groups,
            grouped=groups_table(facts) if len(members) < len(facts) else None,
        )

    def latex(self, run: Keys, sort: str = "", groups: bool = False) -> PlainTextResponse:
        """The table of the named runs, or of all, as LaTeX; ``groups`` for that of their groups."""
        for key in run:
            self._library.run(key)  # raises UserError for a name that no run has
        facts, _ = self._facts()
        facts = [each for each in facts if each.run.key in run or not run]
        columns, _ = _columns([each.run for each in facts])
        order = order_of(facts, columns, sort)
        columns = {name: [values[n] for n in order] for name, values in columns.items()}
        facts = [facts[n] for n in order]
        table = groups_table(facts) if groups else runs_table(facts, columns)
        return PlainTextResponse(to_latex(table) + "\n")

    def run(self, run: str = "") -> HTMLResponse:
        """One run: its charts, signs of a collapse, evaluations and settings."""
        shown = self._library.run(run)
        rows = self._library.metrics(shown)
        health, level = health_charts(rows)
        signs, note = sign_states(shown, rows)
        config_error = shown.config_error()
        return viewer_page(
            "run.html",
            here="run",
            run=shown,
            facts=facts_of(shown, self._library),
            files=shown.episode_files(),
            figures=shown.figures_files(),
            learning=learning_charts(rows),
            health=health,
            level=level,
            signs=signs if rows else [],
            signs_note=note,
            sections=self._sections([shown]),
            config_yaml="" if config_error else shown.config_text(),
            config_error=config_error,
        )

    def curves(
        self,
        run: Keys,
        metric: Keys,
        smoothing: Smoothing = SMOOTHING,
        log: bool = False,
        groups: bool = False,
    ) -> JSONResponse:
        """A chart for each metric, with a line for each run, or for each group of runs.

        The chart is None for a metric without values.
        """
        rows = {key: self._library.metrics(self._library.run(key)) for key in run}
        steps = {key: tuple(row["step"] for row in rows[key]) for key in run}
        members = groups_of_runs([self._library.run(key) for key in rows]) if groups else {}
        charts: dict[str, Any] = {}
        for name in metric:
            values = {key: tuple(row.get(name, math.nan) for row in rows[key]) for key in run}
            lines = {key: Series(key, "s0", steps[key], values[key]) for key in run}
            series = [
                group_series(label, {key: lines[key] for key in keys}, smoothing)
                for label, keys in members.items()
            ] or list(lines.values())
            chart = line_chart(
                name, series, is_log=log, smoothing=smoothing, most_points=_MOST_POINTS
            )
            charts[name] = chart and chart.data
        return JSONResponse(charts)

    def figures(self, run: Keys, metric: Keys) -> Response:
        """Recorded values as CSV for a spreadsheet: a row for each run and step."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["run", "step", *map(_no_formula, metric)])
        for key in run:
            for row in self._library.metrics(self._library.run(key)):
                values = [row.get(name, math.nan) for name in metric]
                shown = [value if math.isfinite(value) else "" for value in values]
                writer.writerow([_no_formula(key), int(row["step"]), *shown])
        name = re.sub("[^a-zA-Z0-9]", "-", "-".join(metric[:2])) or "figures"
        headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
        return Response(text.getvalue(), media_type="text/csv", headers=headers)

    def _facts(self) -> tuple[list[RunFacts], list[str]]:
        """The facts about each run, and what is wrong with those that cannot be shown."""
        facts: list[RunFacts] = []
        errors: list[str] = []
        for run in self._library.runs():
            try:
                facts.append(facts_of(run, self._library))
            except UserError as error:  # a damaged file must not hide other runs
                errors.append(str(error))
            except Exception as error:  # a run's files may contain anything
                LOG.exception("cannot show %s", run.directory)
                errors.append(f"cannot show {run.directory}: {error!r}")
            else:
                errors += filter(None, [run.config_error()])
        return facts, errors

    def _sections(self, runs: Sequence[ShownRun]) -> dict[str, list[Metric]]:
        """Every metric that any of the runs logged, by section; headline metrics come first."""
        names = {
            name: None for run in runs for row in self._library.metrics(run)[-50:] for name in row
        }
        names.pop("step", None)
        sections: dict[str, list[Metric]] = {}
        for name in sorted(names):
            words = words_of(name)
            title = words.section if words else "Other metrics"
            sections.setdefault(title, []).append((name, words))
        first = [(name, words_of(name)) for name in HEADLINE_METRICS if name in names]
        return ({"At a glance": first} if first else {}) | sections


def _columns(runs: Sequence[ShownRun]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The settings in which runs differ: those with a column in the table, and the others."""
    settings = differing_settings(runs)
    short = [
        name
        for name, values in settings.items()
        if max(map(len, values)) < _LONG and not any("/" in value for value in values)
    ]
    return {name: settings.pop(name) for name in short[:_MAX_SETTINGS]}, settings


def _no_formula(text: str) -> str:
    """Quotes a name that a spreadsheet would run as a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
