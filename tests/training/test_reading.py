"""Reading is judged by what only a passage tells, and by nothing else."""

import math
from dataclasses import replace

import torch

from forage import attention
from forage.training.warm_start import ReadArguments, find_read_arguments, reading_accuracy
from forage.types import Episode, Origin, Segment
from tests.fakes import tiny_codec, tiny_model
from tests.training.sequences import random_tokens
from tests.training.test_warm_start import episode

INFORMATION = "\n\n<information>Doc 1(Title: Rome) On the Tiber.</information>\n\n"


def texts_of(played: Episode) -> list[str]:
    found = find_read_arguments(played, tiny_codec())
    assert found.token_ids_T == played.token_ids_T
    return [tiny_codec().decode(found.token_ids_T[first:end]) for first, end in found.spans]


def test_an_answer_that_stood_in_a_passage_was_read():
    spans = texts_of(episode(INFORMATION))
    assert len(spans) == 1
    assert "Tiber" in spans[0]


def test_what_the_question_names_was_not_read():
    assert texts_of(episode(INFORMATION, answer="Rome")) == []


def test_a_guess_was_not_read():
    assert texts_of(episode(INFORMATION, answer="Arno")) == []


def test_a_passage_after_the_turn_does_not_count():
    played = episode(INFORMATION)
    late = Segment(Origin.OBSERVATION, tuple(tiny_codec().encode_trusted("Tiber")))
    early = Segment(Origin.OBSERVATION, tuple(tiny_codec().encode_trusted("Nothing found.")))
    prompt, search, _, answer = played.segments
    moved = (prompt, search, early, answer, late)
    assert find_read_arguments(replace(played, segments=moved), tiny_codec()).spans == ()


def test_accuracy_is_the_share_of_spans_that_the_model_would_have_written():
    model = tiny_model()
    attention.install(model)
    prefix = tuple(random_tokens(12, seed=3))
    written = greedy(prefix, 3)
    right = ReadArguments((*prefix, *written), ((12, 15),))
    wrong_last = (written[-1] + 1) % model.config.vocab_size
    wrong = ReadArguments((*prefix, *written[:-1], wrong_last), ((12, 15),))
    assert reading_accuracy(model, [right]) == 1.0
    assert reading_accuracy(model, [right, wrong]) == 0.5
    assert reading_accuracy(model, [wrong]) == 0.0


def test_without_anything_to_read_there_is_no_accuracy():
    assert math.isnan(reading_accuracy(tiny_model(), []))


def greedy(prefix: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The most likely continuation, by the model's own forward pass."""
    plain = tiny_model()
    ids = list(prefix)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(plain(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prefix) :])
