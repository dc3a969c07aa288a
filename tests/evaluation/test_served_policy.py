"""An evaluation with a real vLLM server, which has the weights of ``model.path`` and no others."""

from pathlib import Path

from forage.episode_json import EpisodeRecord
from forage.evaluation.evaluate import run_evaluation
from forage.records import read_episodes
from tests.tiny_runs import make_config, warm_model
from tests.vllm_server import needs_vllm, real_server, served_config

pytestmark = needs_vllm


def transcripts(records: list[EpisodeRecord]) -> dict[tuple[str | None, str], list[int]]:
    """The tokens of each arm's episodes."""
    return {
        (record.arm, record.episode.question.id): [
            token for segment in record.episode.segments for token in segment.token_ids_T
        ]
        for record in records
    }


def test_a_served_policy_is_evaluated_as_the_one_in_process(tmp_path: Path):
    """The server starts with other weights, so it would answer differently without the update."""
    warm = {"path": str(warm_model())}
    config = make_config(tmp_path / "here", model=warm, evaluation={"arms": ["normal"]})
    _, out = run_evaluation(config, None)
    served = served_config(
        tmp_path / "served", real_server(), model=warm, evaluation={"arms": ["normal"]}
    )
    _, served_out = run_evaluation(served, None)
    mine, theirs = (list(read_episodes(path.with_suffix(".jsonl"))) for path in (out, served_out))
    assert transcripts(mine) == transcripts(theirs)
    sampled = [v for r in theirs for s in r.episode.segments for v in s.versions_T]
    assert set(sampled) == {0}
