"""The sentences of the hard world: each fact with its noun, and in wordings that leave it out.

``hard_world.py`` decides which facts exist and which wordings are used; names come from
``language.py``. ``{name}`` is the article's subject, ``{value}`` the fact, ``{x}`` the entity a
question is about. The first wording of each is the one with the noun.
"""

from __future__ import annotations

Wordings = tuple[str, ...]

_PAST = ("occupation", "residence", "venue")
_PEOPLE = ("founder", "owner", "author", "editor")


def _is(relation: str) -> str:
    return "was" if relation in _PAST else "is"


_FACTS = {
    "birthplace": ("{name} was born in {value}.", "{name} came from {value}."),
    "occupation": ("{name} worked as a {value}.", "{name} earned a living as a {value}."),
    "residence": ("{name} lived in {value}.", "{name} moved to {value}."),
    "founder": ("{value} started {name}.", "{name} was set up by {value}."),
    "owner": ("{value} bought {name}.", "{name} belongs to {value}."),
    "seat": ("{name} is based in {value}.", "{name} has its rooms in {value}."),
    "author": ("{value} wrote {name}.", "{name} was written by {value}."),
    "editor": ("{value} prepared {name} for print.", "{name} was put in order by {value}."),
    "venue": ("{name} was held in {value}.", "{value} hosted {name}."),
    "region": ("{name} lies in {value}.", "{name} belongs to {value}."),
    "product": ("{name} is known for {value}.", "{name} sells {value}."),
    "capital": ("The largest town in {name} is {value}.", "{name} is ruled from {value}."),
    "birth year": (
        "{name} was born in the year {value}.",
        "In {value} {name} came into the world.",
    ),
    "opening year": ("{name} opened in {value}.", "{name} has been in trade since {value}."),
    "population": ("{value} people live in {name}.", "{name} has {value} inhabitants."),
}
FACTS: dict[str, Wordings] = {
    relation: (f"The {relation} of {{name}} {_is(relation)} {{value}}.", *others)
    for relation, others in _FACTS.items()
}

_ASK = {
    "birthplace": "Where was {x} born?",
    "occupation": "What did {x} work as?",
    "residence": "Where did {x} live?",
    "founder": "Who started {x}?",
    "owner": "Whom does {x} belong to?",
    "seat": "Where is {x} based?",
    "author": "Who wrote {x}?",
    "editor": "Who prepared {x} for print?",
    "venue": "Where was {x} held?",
    "region": "Where does {x} lie?",
    "product": "What does {x} sell?",
    "capital": "From where is {x} ruled?",
    "birth year": "When was {x} born?",
    "opening year": "Since when is {x} open?",
    "population": "How many people live in {x}?",
}
ASK: dict[str, Wordings] = {
    relation: (
        f"{'Who' if relation in _PEOPLE else 'What'} {_is(relation)} the {relation} of {{x}}?",
        other,
    )
    for relation, other in _ASK.items()
}

_REFER = {
    "birthplace": "the town where {x} was born",
    "residence": "the town where {x} lived",
    "founder": "the person who started {x}",
    "owner": "the person who bought {x}",
    "seat": "the town where {x} is based",
    "author": "the person who wrote {x}",
    "editor": "the person who prepared {x} for print",
    "venue": "the town that hosted {x}",
    "region": "the region that {x} lies in",
    "capital": "the town that {x} is ruled from",
}
REFER: dict[str, Wordings] = {
    relation: (f"the {relation} of {{x}}", other) for relation, other in _REFER.items()
}

COMPARE = {"birth year": "Who is older, {a} or {b}?", "opening year": "Which is older, {a} or {b}?"}
