"""A made-up run: metrics, evaluations and episodes shaped like real ones."""

import math
import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forage.evaluation.scores import scores_of
from forage.evaluation.summary import em_gain, summarise
from forage.records import RunRecords
from forage.types import (
    ActionKind,
    Episode,
    FailureKind,
    Hop,
    Origin,
    Question,
    Reward,
    Segment,
    Status,
    Turn,
    search_call,
)
from forage.viewer.report import ReportInput, choose_episodes
from tests.episode_files import write_episode_file

PROMPT = (
    "Answer the question. Reason inside <think> and </think>. You may call a search engine with "
    "<search> query </search>; what it finds stands between <information> and </information>. "
    "Give the answer inside <answer> and </answer>, for example <answer> Oslo </answer>.\n"
    "Question: {question}\n"
)
NAMES = ("Mavo Teril", "Sena Kordu", "Ruvi Palem", "Toka Minre", "Belu Sarvo", "Nido Waska")
TOWNS = ("Karvel", "Onbira", "Tesmo", "Luvanne", "Pradik", "Semmor")
RELATIONS = ("was born in", "lies in", "is led by")


def make_question(index: int) -> Question:
    """Question ``index``, with one, two or three hops in turn."""
    num_hops = 1 + index % 3
    names = [NAMES[index % 6], TOWNS[index % 6], f"{TOWNS[(index + 2) % 6]} region", NAMES[-1]]
    hops = tuple(
        Hop(names[n], RELATIONS[n], names[n + 1], f"a{index}-{n}") for n in range(num_hops)
    )
    text = {
        1: f"Where was {names[0]} born?",
        2: f"In which region lies the town where {names[0]} was born?",
        3: f"Who leads the region that holds the town where {names[0]} was born?",
    }[num_hops]
    return Question(
        id=f"test-{index}",
        text=text,
        golden_answers=(names[num_hops],),
        source="world",
        gold_passage_ids=tuple(hop.passage_id for hop in hops),
        hops=hops,
    )


@dataclass(frozen=True)
class Player:
    """Plays made-up episodes: with ``skill`` it searches every hop, otherwise it guesses early."""

    tokenizer: Tokenizer
    skill: float
    version: int

    def play(self, question: Question, member: int, arm: str, extra: str = "") -> Episode:
        rng = random.Random(f"{question.id} {member} {self.skill} {arm}")
        num_hops = len(question.hops)
        knows_how = rng.random() < self.skill ** (num_hops**0.5)
        searches = num_hops if knows_how else rng.randrange(num_hops)
        segments = [self._segment(Origin.PROMPT, PROMPT.format(question=question.text), rng)]
        turns: list[Turn] = []
        for hop in question.hops[:searches]:
            sampled = (
                f"<think> {hop.subject} {hop.relation} what? </think>\n"
                f"<search> {hop.subject} {hop.relation} </search>"
            )
            seen = arm in ("normal", "gold")
            observation = (
                _observation(hop, extra) if seen else "\n\n<information></information>\n\n"
            )
            ids = (hop.passage_id, f"x{rng.randrange(900)}", f"x{rng.randrange(900)}")
            failed = self.version == 0 and rng.random() < 0.03
            turns.append(
                Turn(
                    sampled,
                    ActionKind.SEARCH,
                    f"{hop.subject} {hop.relation}",
                    observation,
                    generate_s=rng.uniform(0.05, 0.3),
                    calls=(
                        search_call(
                            [f"{hop.subject} {hop.relation}"],
                            ids if seen else (),
                            FailureKind.TIMEOUT if failed else None,
                            rng.uniform(0.004, 0.02),
                        ),
                    ),
                )
            )
            segments += [
                self._segment(Origin.SAMPLED, sampled, rng),
                self._segment(Origin.OBSERVATION, observation, rng),
            ]
        can_read = arm in ("normal", "gold")
        right = can_read and (knows_how or arm == "gold") and rng.random() < 0.97
        answer = question.golden_answers[0] if right else rng.choice(TOWNS)
        sampled = f"<think> so it is {answer} </think>\n<answer> {answer} </answer>"
        turns.append(Turn(sampled, ActionKind.ANSWER, answer, generate_s=rng.uniform(0.05, 0.2)))
        segments.append(self._segment(Origin.SAMPLED, sampled, rng))
        em = float(answer == question.golden_answers[0])
        return Episode(
            question,
            member,
            tuple(segments),
            tuple(turns),
            Status.ANSWERED,
            Reward(em, {"em": em, "cover_em": em, "f1": em, "format": 1.0}),
            seconds=rng.uniform(0.3, 1.2),
        )

    def _segment(self, origin: Origin, text: str, rng: random.Random) -> Segment:
        ids = tuple(self.tokenizer.encode(text).ids)
        if origin is not Origin.SAMPLED:
            return Segment(origin, ids)
        logprobs = tuple(-(rng.random() ** 9) * 3 for _ in ids)
        return Segment(origin, ids, logprobs, (self.version,) * len(ids))


def _observation(hop: Hop, extra: str) -> str:
    return (
        f"\n\n<information>Doc 1(Title: {hop.subject}) {hop.subject} {hop.relation} {hop.value}, "
        f"as the older chronicles agree. {extra}\n"
        f"Doc 2(Title: {hop.subject} II) A namesake who {hop.relation} another place entirely.\n"
        "Doc 3(Title: Winter fair) The fair of Tesmo opens when the river freezes.\n"
        "</information>\n\n"
    )


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of a few hundred tokens, like the demo's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    texts = [PROMPT, " ".join(NAMES + TOWNS + RELATIONS)]
    texts += [_observation(hop, "") for index in range(6) for hop in make_question(index).hops]
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer


def make_metrics(num_steps: int) -> list[dict[str, float]]:
    """Rows in the loop's format, improving as in real runs."""
    rng = random.Random(0)
    rows: list[dict[str, float]] = []
    for step in range(num_steps):
        learnt = 1 - math.exp(-step / (num_steps / 5))

        def level(start: float, end: float, noise: float, learnt: float = learnt) -> float:
            return start + (end - start) * learnt + rng.gauss(0, noise)

        em = {
            n: min(1.0, max(0.0, level(0.75 - 0.25 * n, 0.93 - 0.03 * n, 0.06))) for n in (1, 2, 3)
        }
        searches = {n: max(0.0, level(0.7 + 0.15 * n, n, 0.12)) for n in (1, 2, 3)}
        rollout = rng.uniform(2.6, 3.4)
        rows.append(
            {
                "step": step,
                "reward/mean": sum(em.values()) / 3,
                "em/mean": sum(em.values()) / 3,
                **{f"em/hops_{n}": value for n, value in em.items()},
                "searches/mean": sum(searches.values()) / 3,
                **{f"searches/hops_{n}": value for n, value in searches.items()},
                "tokens/sampled_mean": level(58, 96, 4),
                "policy/entropy": max(0.02, level(0.34, 0.11, 0.01)),
                "policy/logprob_diff_max": 10 ** rng.uniform(-6.2, -5.3),
                "policy/kl": abs(rng.gauss(0, 2e-4)),
                "loss/total": rng.gauss(0, 0.02),
                "loss/clip_fraction": abs(rng.gauss(0.004, 0.003)),
                "optimizer/grad_norm": abs(level(1.6, 0.7, 0.2)),
                "optimizer/learning_rate": min(1.0, (step + 1) / 5) * 5e-5,
                "seconds/rollout": rollout,
                "seconds/train": rng.uniform(1.7, 2.2),
                "seconds/publish": 0.05,
                "seconds/record": 0.12,
                "seconds/search_wait": 0.5,
                "search/failures": float(rng.random() < 0.06),
                "episodes/answered": 0.97,
                "episodes/excluded": 0.0,
                "transcript/violations": 0.0,
                "rollout/tokens_per_s": 9000 / rollout,
            }
        )
    return rows


def make_report_input(
    num_steps: int = 60, num_questions: int = 60, extra: str = "", note: str | None = None
) -> ReportInput:
    """The input of a whole report; ``extra`` goes into every first passage."""
    tokenizer = make_tokenizer()
    played = {}
    for label, skill, version in (("before", 0.45, 0), ("after", 0.97, num_steps)):
        player = Player(tokenizer, skill, version)
        played[label] = {
            arm: [player.play(make_question(i), 0, arm, extra) for i in range(num_questions)]
            for arm in ("normal", "closed_book", "gold", "random")
        }
    before, after = played["before"], played["after"]
    scores = {
        label: {arm: scores_of(episodes) for arm, episodes in arms.items()}
        for label, arms in played.items()
    }
    return ReportInput(
        name="First light",
        note="A model of 0.9 million parameters, from random weights to searching, on two cores."
        if note is None
        else note,
        config_yaml="name: first light\nseed: 0\ntrainer:\n  num_steps: 60\n  group_size: 8\n",
        metrics=make_metrics(num_steps),
        environment="2 cores, torch 2.13.0, Python 3.11",
        total_seconds=754.0,
        before=summarise(scores["before"]),
        after=summarise(scores["after"]),
        em_gain=em_gain(scores["before"]["normal"], scores["after"]["normal"]),
        warm_start=[
            (step, 0.35 + 4.6 * math.exp(-step / 60) + 0.08 * math.sin(step)) for step in range(400)
        ],
        episodes=choose_episodes(before["normal"], after["normal"]),
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
    )


def write_run(directory: Path, num_steps: int = 6, extra: str = "") -> None:
    """A run's directory as training leaves it: records, evaluations, model and config."""
    tokenizer = make_tokenizer()
    with RunRecords(directory, has_tensorboard=False) as records:
        for row in make_metrics(num_steps):
            step = int(row.pop("step"))
            player = Player(tokenizer, 0.45 + 0.08 * step, step)
            episodes = [
                player.play(make_question(i), member, "normal", extra)
                for i in range(3)
                for member in range(2)
            ]
            records.write_metrics(step, row)
            records.write_episodes(step, episodes)
    player = Player(tokenizer, 0.97, num_steps)
    arms = {arm: [player.play(make_question(7), 0, arm)] for arm in ("normal", "closed_book")}
    write_episode_file(directory / "evaluation" / "after.jsonl", num_steps, arms)
    (directory / "model").mkdir()
    tokenizer.save(str(directory / "model" / "tokenizer.json"))
    (directory / "config.yaml").write_text("name: first light\nseed: 0\n", encoding="utf-8")
