"""What arms, data sources and numbers of hops are called in tables, charts and reports."""

from __future__ import annotations

from forage.evaluation.published import literature

ARM_NAMES = {
    "normal": "searching",
    "closed_book": "closed book",
    "empty": "empty results",
    "gold": "gold passages",
    "random": "random passages",
    "other_retriever": "other retriever",
}
ARM_NOTES = {
    "normal": "what the retriever finds",
    "closed_book": "nothing: there is no search, and the policy is told to answer from memory",
    "empty": "that nothing was found, each time",
    "gold": "always the right passages, so that only reading counts",
    "random": "passages drawn at random, which shows what chance gives",
    "other_retriever": "what another retriever finds",
}


def arm_name(arm: str, searches: bool = True) -> str:
    """``searches``: whether the method ever searches; the arms are about what is found then."""
    if arm == "normal" and not searches:
        return "without search"
    return ARM_NAMES.get(arm, arm.replace("_", " "))


def source_name(source: str) -> str:
    return literature().names.get(source, source)


def hops_text(hops: int) -> str:
    return "1 hop" if hops == 1 else f"{hops} hops"
