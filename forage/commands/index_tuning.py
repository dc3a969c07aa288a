"""``forage index --tune``: chooses BM25's k1 and b on questions, and prints what they gain.

``forage.retrieval.index.tuning`` measures and writes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forage.retrieval.index.tuning import Tuning

LOG = logging.getLogger(__name__)


def tune(index: Path, questions: Path, topk: int) -> None:
    """Tunes an index, but keeps its parameters if the new ones lose on the other half."""
    from forage.data.questions import read_questions
    from forage.evaluation.intervals import bootstrap_interval
    from forage.retrieval.index.tuning import tune_index, write_parameters

    tuning = tune_index(index, read_questions(questions), topk)
    _print(tuning, topk)
    before, after = tuning.reported(tuning.before), tuning.reported(tuning.chosen)
    gains = after - before
    interval = bootstrap_interval(gains.tolist())
    LOG.info(
        "recall@%d on the other %d questions: %.3f before, %.3f after, gain %+.3f (95 %% interval "
        "%+.3f to %+.3f); %d questions with neither an answer nor gold passages in the index were "
        "left out. Tuning changes neither the weight of titles, which count as text, nor --size",
        *(topk, len(gains), before.mean(), after.mean(), gains.mean()),
        *(interval.low, interval.high, tuning.num_left_out),
    )
    old, new = tuning.before, tuning.chosen
    if old == new or gains.mean() < 0:
        LOG.info("%s keeps k1 %g and b %g", index, *old)
        return
    write_parameters(index, *new)
    LOG.info("%s now has k1 %g and b %g, instead of %g and %g", index, *new, *old)


def _print(tuning: Tuning, topk: int) -> None:
    from rich.console import Console
    from rich.table import Table

    means = tuning.recalls[:, : tuning.num_choosing].mean(axis=1)
    recall_of = dict(zip(tuning.pairs, means.tolist(), strict=True))
    bs = sorted({b for _, b in tuning.pairs})
    title = f"recall@{topk} of {tuning.num_choosing} questions"
    table = Table(title=title, title_justify="left")
    for heading in ("k1 \\ b", *(f"{b:g}" for b in bs)):
        table.add_column(heading, justify="right")
    for k1 in sorted({k1 for k1, _ in tuning.pairs}):
        cells = [(recall_of.get((k1, b)), (k1, b)) for b in bs]
        table.add_row(
            f"{k1:g}",
            *(
                "" if recall is None else f"{recall:.3f}{'*' * (pair == tuning.chosen)}"
                for recall, pair in cells
            ),
        )
    Console().print(table)
