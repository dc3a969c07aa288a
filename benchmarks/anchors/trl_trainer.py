"""TRL's ``GRPOTrainer`` on the demo's questions, tags and rules: one step per request.

The tokenizer gets a chat template and a response template that spell the demo's tags, so TRL's own
tool loop plays the episodes that the model was trained for. ``rollout_func`` plays the same turns
itself. A second process is started here, and learns data-parallel over gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.anchors.demo_world import PACKAGE, STANDING_RATE, demo_config
from benchmarks.anchors.talk import Talk

MICRO_BATCHES = {1: 32, 2: 24}
"""Episodes in a micro-batch by processes; it divides the episodes of each."""
EPISODES = 96
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- set named = call.function.name ~ ' ' ~ call.function.arguments | tojson -%}
<search>{{ call.function.arguments.query or named }}</search>
{%- endfor -%}
{%- endfor -%}"""
"""A user's message is the whole prompt, and a tool's the whole observation."""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"(?:Question: [^\n]*\n|</information>\s*)",
    "fields": {
        "tool_calls": {
            "open": "<search>",
            "close_pattern": r"</search>\s*",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "search", "arguments": {"query": "{content}"}},
            },
        },
        "content": {"close_pattern": r"\Z", "content": "text"},
    },
}


def take_steps(talk: Talk, world: str, folder: str, kind: str, processes: int) -> None:
    """Runs rank 0 here and the other rank in a separate process."""
    if processes == 1:
        _train(talk, world, folder, kind, processes)
        return
    from forage.retrieval.serve.port import bind_port

    with bind_port("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    command = [sys.executable, "-m", "benchmarks.anchors.trl_trainer", world, folder, kind]
    ranks = {"RANK": "1", "LOCAL_RANK": "1"}
    other = subprocess.Popen([*command, str(processes)], env=os.environ | ranks)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    try:
        _train(talk, world, folder, kind, processes)
    finally:
        other.kill()
        other.wait()


def _train(talk: Talk | None, world: str, folder: str, kind: str, processes: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    rules = _Rules(Path(world))
    each = EPISODES // processes
    micro_batch = MICRO_BATCHES[processes]
    assert each % micro_batch == 0, "TRL would play fewer episodes"
    model = AutoModelForCausalLM.from_pretrained(
        str(PACKAGE / "warm" / "model"), dtype=torch.float32, attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = rules.stop_ids
    settings = GRPOConfig(
        output_dir=str(Path(folder) / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=each // micro_batch,
        num_generations=8,
        max_completion_length=rules.environment.max_tokens - 128,
        max_tool_calling_iterations=rules.environment.max_turns,
        generation_kwargs={
            "max_new_tokens": rules.environment.max_turn_tokens,
            "eos_token_id": rules.stop_ids,
        },
        temperature=1.0,
        beta=0.0,
        learning_rate=STANDING_RATE,
        lr_scheduler_type="constant",
        max_steps=100_000,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        ddp_backend="gloo" if processes > 1 else None,
        ddp_find_unused_parameters=False,
    )
    way: dict[str, Any] = {"tools": [rules.search]}
    if kind == "rollout_func":
        way = {"rollout_func": rules.rollout}
    trainer = GRPOTrainer(
        model,
        reward_funcs=rules.reward,
        args=settings,
        train_dataset=Dataset.from_list(rules.rows()),
        processing_class=rules.tokenizer,
        callbacks=[_steps_on_request(talk, rules)],
        **way,
    )
    rules.timed(trainer)
    trainer.train()


def _steps_on_request(talk: Talk | None, rules: _Rules) -> Any:
    """A callback that waits for a request before each step, and replies after it.

    The other rank waits at rank 0's first collective of the step.
    """
    from transformers import TrainerCallback

    class OnRequest(TrainerCallback):
        started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if talk is not None and state.global_step > 0:
                if state.global_step == 1:
                    talk.ready(threads=os.environ["OMP_NUM_THREADS"])
                if talk.next_request() is None:
                    os._exit(0)  # the other rank would wait for this one
            if state.global_step > 0:
                _meet()
            self.started = time.perf_counter()
            rules.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.started
            if talk is not None and state.global_step > 1:
                talk.reply(
                    value=seconds,
                    rollout=rules.rollout_s,
                    learning=seconds - rules.rollout_s,
                    tokens_per_episode=rules.num_sampled / max(rules.num_played, 1),
                )

    return OnRequest()


def _meet() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


class _Rules:
    """The demo's prompts, search, observations and reward, as TRL takes them."""

    def __init__(self, world: Path) -> None:
        from transformers import AutoTokenizer

        from forage.data.questions import read_questions
        from forage.environment.codec import Codec
        from forage.environment.template import PromptTemplate
        from forage.retrieval.index.index import open_index
        from forage.training.model import load_tokenizer

        config = demo_config(world, world / "unused")
        self.environment, self.topk = config.environment, config.search.topk
        self.codec = Codec(load_tokenizer(config.model))
        self.questions = read_questions(world / "train.jsonl")
        self.index = open_index(world / "index")
        self.template = PromptTemplate.load(self.environment.prompt)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self.tokenizer.eos_token, self.tokenizer.pad_token = "</search>", "<|endoftext|>"
        self.tokenizer.chat_template = CHAT_TEMPLATE
        self.tokenizer.response_template = RESPONSE_TEMPLATE
        self.stop_ids = [0, *map(self.tokenizer.convert_tokens_to_ids, ("</search>", "</answer>"))]
        self.begin()

    def begin(self) -> None:
        """Forgets the last step's figures."""
        self.rollout_s, self.num_sampled, self.num_played = 0.0, 0, 0

    def rows(self) -> list[dict[str, Any]]:
        from forage.environment.prompt import encode_prompt

        most = self.environment.max_tokens - 1
        prompts = [
            self.codec.decode(encode_prompt(question, self.codec, self.template, most))
            for question in self.questions[:2000]
        ]
        return [
            {"prompt": [{"role": "user", "content": text}], "answers": list(q.golden_answers)}
            for text, q in zip(prompts, self.questions, strict=False)
        ]

    def search(self, query: str) -> str:
        """Searches the encyclopedia.

        Args:
            query: What to search for.

        Returns:
            The passages found.
        """
        return self.codec.decode(self.observation_ids(query))

    def observation_ids(self, query: str) -> Sequence[int]:
        from forage.environment.observation import build_observation

        hits = self.index.search([query.strip() or "nothing"], self.topk)[0]
        most = self.environment.max_observation_tokens
        return build_observation(hits, self.codec, most).token_ids

    def reward(self, completions: Any, answers: Any, **_: Any) -> list[float | None]:
        """1 for an episode whose last turn contains a golden answer's exact match."""
        from forage.environment.actions import Answer, parse_action
        from forage.rewards.answers import exact_match

        rewards: list[float | None] = []
        for completion, golden in zip(completions, answers, strict=True):
            action = parse_action(completion[-1].get("content") or "")
            is_right = isinstance(action, Answer) and exact_match(action.text, golden)
            rewards.append(float(is_right))
        return rewards

    def timed(self, trainer: Any) -> None:
        """Measures TRL's generation, tool calls and scoring, and counts what it sampled."""
        generate: Callable[..., Any] = trainer._generate_and_score_completions

        def measured(inputs: Any) -> Any:
            started = time.perf_counter()
            output = generate(inputs)
            self.rollout_s += time.perf_counter() - started
            mask = output.get("tool_mask", output["completion_mask"]) * output["completion_mask"]
            self.num_sampled += int(mask.sum())
            self.num_played += len(mask)
            return output

        trainer._generate_and_score_completions = measured

    def rollout(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        """Plays all episodes of the batch, turn by turn, each turn in one batch of those left."""
        import torch

        from benchmarks.engine import generate_batch
        from forage.environment.actions import Search, parse_action

        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        texts = [message[0]["content"] for message in prompts]
        prompt_ids: list[list[int]] = self.tokenizer(texts)["input_ids"]
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        active, environment = list(range(len(prompts))), self.environment
        model.eval()
        for turn in range(environment.max_turns + 1):
            ids = [prompt_ids[place] + completions[place] for place in active]
            with torch.no_grad():
                new = generate_batch(model, ids, environment.max_turn_tokens, self.stop_ids)
            still: list[int] = []
            for place, sampled in zip(active, new, strict=True):
                completions[place] += sampled
                masks[place] += [1] * len(sampled)
                action = parse_action(self.codec.decode(sampled))
                if turn == environment.max_turns or not isinstance(action, Search):
                    continue
                seen = self.observation_ids(action.query)
                length = len(prompt_ids[place]) + len(completions[place]) + len(seen)
                if length + environment.max_turn_tokens < environment.max_tokens:
                    completions[place] += seen
                    masks[place] += [0] * len(seen)
                    still.append(place)
            active = still
            if not active:
                break
        model.train()
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
        }


if __name__ == "__main__":
    world, folder, kind, processes = sys.argv[1:]
    _train(None, world, folder, kind, int(processes))
