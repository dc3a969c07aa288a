"""The example of a verifiers environment, evaluated by the real package in a separate
environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forage.config.run_config import to_yaml
from forage.data.questions import read_questions
from forage.retrieval.client.client import SearchClient
from tests.doors.guests import THOUGHT, played_by_forage, qwen3, recipe, reward_of
from tests.doors.scripted_chat import scripted_chat
from tests.environment.families import QWEN3, family_tokenizer
from tests.tiny_runs import world_dir

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".verifiers" / "bin"
pytestmark = [
    pytest.mark.verifiers,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PROGRAMS.is_dir(), reason="no .verifiers here: make verifiers"),
]


async def test_vf_eval_searches_and_scores_as_forage_does(tmp_path: Path):
    questions = read_questions(world_dir() / "train.jsonl")[:2]
    config = recipe(qwen3(QWEN3), reward={"weights": {"f1": 0.5}})
    (tmp_path / "recipe.yaml").write_text(to_yaml(config), encoding="utf-8")
    written: dict[str, list[str]] = {question.text: [] for question in questions}

    def turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Searches for the first question and answers it correctly; guesses the other one wrong."""
        question = next(q for q in questions if q.text in json.dumps(messages, ensure_ascii=False))
        turns = written[question.text]
        arguments = json.dumps({"query_list": [question.text]})
        if question is questions[1] or messages[-1]["role"] == "tool":
            is_right = question is questions[0]
            answer = f"<answer> {question.golden_answers[0] if is_right else 'Rome'} </answer>"
            turns.append(f"{THOUGHT}{answer}")
            return {"content": turns[-1]}
        call = f'{{"name": "search", "arguments": {arguments}}}'
        turns.append(f"{THOUGHT}<tool_call>\n{call}\n</tool_call>")
        function = {"name": "search", "arguments": arguments}
        calls = [{"id": "call_1", "type": "function", "function": function}]
        return {"content": THOUGHT, "tool_calls": calls}

    with scripted_chat(turn) as (url, seen):
        traces = _evaluate(tmp_path, url)
    [function] = [tool["function"] for tool in seen[0]["tools"]]
    assert function["name"] == "search"
    assert function["description"].startswith("Searches an encyclopedia")
    assert function["parameters"]["required"] == ["query_list"]
    for question in questions:
        trace = next(t for t in traces if t["task"]["data"]["question"]["id"] == question.id)
        async with SearchClient(config.search) as search:
            episode = await played_by_forage(
                config, family_tokenizer("qwen3"), question, written[question.text], search
            )
        reward = await reward_of(config, episode)
        assert trace["rewards"]["recipe_reward"]["score"] == pytest.approx(reward.pop(""), abs=1e-4)
        assert {k: trace["metrics"][k] for k in reward} == pytest.approx(reward, abs=1e-4)
        shown = [n["message"] for n in trace["nodes"] if n["message"]["role"] == "tool"]
        assert len(shown) == len(written[question.text]) - 1
        for message in shown:
            assert json.dumps("Doc 1(Title: ")[1:-1] in json.dumps(message)


def _evaluate(directory: Path, url: str) -> list[dict[str, Any]]:
    """The traces that ``vf-eval`` writes for the first two questions."""
    words = (
        f"vf-eval verifiers_environment --env.taskset.recipe recipe.yaml -n 2 --no-push --no-rich "
        f"--env.agent.harness.id null --env.agent.runtime.type subprocess --model scripted "
        f"--run.name scripted "
        f"--client.base-url {url} --client.api-key-var FORAGE_TEST_KEY"
    ).split()
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        "HOME": str(directory),
        "FORAGE_TEST_KEY": "none",
    }
    ended = subprocess.run(
        [str(PROGRAMS / words[0]), *words[1:]],
        cwd=directory,
        env=environment,
        timeout=500,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    [file] = directory.rglob("traces.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines()
    return [trace for line in lines for trace in json.loads(line)["traces"]]
