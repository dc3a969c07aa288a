"""The baselines with one prompt: a single context, and at most one search, made by the method.

Direct inference, as in Search-R1's table (https://arxiv.org/abs/2503.09516), asks for the answer at
once; the prompt's wording differs. Chain of thought: Wei et al., https://arxiv.org/abs/2201.11903.
The paper shows worked examples before the question; here the prompt asks for steps in words, as
zero-shot prompts do (Kojima et al., https://arxiv.org/abs/2205.11916), and the answer is in tags,
so that no second prompt has to extract it. Retrieval-augmented generation: Lewis et al.,
https://arxiv.org/abs/2005.11401. The paper trains retriever and reader together and sums over
passages; here, as in Search-R1's table, one prompt shows the ``search.topk`` passages to a model
that was not trained for it.
"""

from __future__ import annotations

from forage.environment.open_episode import OpenEpisode
from forage.environment.prompt import with_question_mark
from forage.evaluation.methods import own_prompts
from forage.evaluation.methods.own_prompts import open_prompt, read_template
from forage.types import Status

DIRECT = read_template("direct")
CHAIN_OF_THOUGHT = read_template("chain_of_thought")
RAG = read_template("rag")


async def ask_once(episode: OpenEpisode, template: str, passages: tuple[int, ...] = ()) -> Status:
    """Fills in the prompt, and takes the answer from the answer tags."""
    texts = {"question": with_question_mark(episode.question.text), "passages": passages}
    return await own_prompts.answer(episode, open_prompt(episode, template, texts))


async def ask_with_passages(episode: OpenEpisode) -> Status:
    """Searches for the question, shows the results, and takes the answer."""
    question = episode.question.text
    found = await own_prompts.search(episode, question)
    texts = {"question": with_question_mark(question), "passages": ()}
    room = own_prompts.room_after(episode, RAG, texts)
    passages = own_prompts.shown_result(episode, found, room)
    own_prompts.record_own_search(episode, found, passages)
    return await ask_once(episode, RAG, passages.token_ids)
