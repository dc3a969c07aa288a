"""Finished evaluations with made-up numbers."""

from forage.evaluation.fingerprint import Protocol
from forage.evaluation.result import EvaluationResult
from forage.evaluation.scores import QuestionScore
from forage.evaluation.summary import summarise

PROTOCOL = Protocol(
    model="models/mine",
    retriever="bm25",
    num_passages=300,
    topk=3,
    prompt="brief",
    form="tags",
    max_turns=4,
    has_final_turn=True,
    max_turn_tokens=500,
    max_observation_tokens=500,
    max_tokens=4096,
    temperature=0.0,
    num_samples=1,
)


def make_score(
    question_id: str,
    em: float,
    source: str = "nq",
    hops: int | None = None,
    failures: tuple[str, ...] = (),
) -> QuestionScore:
    return QuestionScore(
        question_id=question_id,
        source=source,
        num_hops=hops,
        digest=f"d-{question_id}",
        em=em,
        cover_em=em,
        f1=(1 + em) / 2,
        searches=1 + em,
        sampled_tokens=80.0,
        seconds=0.5,
        answered=1.0,
        gold_recall=em if hops else None,
        pass_at={},
        failures=failures,
    )


def make_result(
    scores: dict[str, list[QuestionScore]], protocol: Protocol = PROTOCOL, name: str = "mine"
) -> EvaluationResult:
    return EvaluationResult(
        name=name,
        note="",
        protocol=protocol,
        fingerprint={"the weights": "abc", "search.topk": "3"},
        summary=summarise(scores, 100),
        scores=scores,
    )
