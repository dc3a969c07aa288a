"""The sentences of the hard world: every fact once with its noun, and in words that leave it out.

``hard_world.py`` decides which facts exist and which wordings are used; names are those of
``language.py``. ``{name}`` is the article's subject, ``{value}`` the fact, ``{x}`` what is asked
about.
"""

from __future__ import annotations

Wordings = tuple[str, ...]

FACTS: dict[str, tuple[Wordings, Wordings]] = {
    "birthplace": (
        ("The birthplace of {name} is {value}.",),
        ("{name} was born in {value}.", "{name} came from {value}."),
    ),
    "occupation": (
        ("The occupation of {name} was {value}.",),
        ("{name} worked as a {value}.", "{name} earned a living as a {value}."),
    ),
    "residence": (
        ("The residence of {name} was {value}.",),
        ("{name} lived in {value}.", "{name} moved to {value}."),
    ),
    "founder": (
        ("The founder of {name} is {value}.",),
        ("{value} started {name}.", "{name} was set up by {value}."),
    ),
    "owner": (
        ("The owner of {name} is {value}.",),
        ("{value} bought {name}.", "{name} belongs to {value}."),
    ),
    "seat": (
        ("The seat of {name} is {value}.",),
        ("{name} is based in {value}.", "{name} has its rooms in {value}."),
    ),
    "author": (
        ("The author of {name} is {value}.",),
        ("{value} wrote {name}.", "{name} was written by {value}."),
    ),
    "editor": (
        ("The editor of {name} is {value}.",),
        ("{value} prepared {name} for print.", "{name} was put in order by {value}."),
    ),
    "venue": (
        ("The venue of {name} was {value}.",),
        ("{name} was held in {value}.", "{value} hosted {name}."),
    ),
    "region": (
        ("The region of {name} is {value}.",),
        ("{name} lies in {value}.", "{name} belongs to {value}."),
    ),
    "product": (
        ("The product of {name} is {value}.",),
        ("{name} is known for {value}.", "{name} sells {value}."),
    ),
    "capital": (
        ("The capital of {name} is {value}.",),
        ("The largest town in {name} is {value}.", "{name} is ruled from {value}."),
    ),
    "birth year": (
        ("The birth year of {name} is {value}.",),
        ("{name} was born in the year {value}.", "In {value} {name} came into the world."),
    ),
    "opening year": (
        ("The opening year of {name} is {value}.",),
        ("{name} opened in {value}.", "{name} has been in trade since {value}."),
    ),
    "population": (
        ("The population of {name} is {value}.",),
        ("{value} people live in {name}.", "{name} has {value} inhabitants."),
    ),
}

ASK: dict[str, tuple[Wordings, Wordings]] = {
    "birthplace": (("What is the birthplace of {x}?",), ("Where was {x} born?",)),
    "occupation": (("What was the occupation of {x}?",), ("What did {x} work as?",)),
    "residence": (("What was the residence of {x}?",), ("Where did {x} live?",)),
    "founder": (("Who is the founder of {x}?",), ("Who started {x}?",)),
    "owner": (("Who is the owner of {x}?",), ("Whom does {x} belong to?",)),
    "seat": (("What is the seat of {x}?",), ("Where is {x} based?",)),
    "author": (("Who is the author of {x}?",), ("Who wrote {x}?",)),
    "editor": (("Who is the editor of {x}?",), ("Who prepared {x} for print?",)),
    "venue": (("What was the venue of {x}?",), ("Where was {x} held?",)),
    "region": (("What is the region of {x}?",), ("Where does {x} lie?",)),
    "product": (("What is the product of {x}?",), ("What does {x} sell?",)),
    "capital": (("What is the capital of {x}?",), ("From where is {x} ruled?",)),
    "birth year": (("What is the birth year of {x}?",), ("When was {x} born?",)),
    "opening year": (("What is the opening year of {x}?",), ("Since when is {x} open?",)),
    "population": (("What is the population of {x}?",), ("How many people live in {x}?",)),
}

REFER: dict[str, tuple[Wordings, Wordings]] = {
    "birthplace": (("the birthplace of {x}",), ("the town where {x} was born",)),
    "residence": (("the residence of {x}",), ("the town where {x} lived",)),
    "founder": (("the founder of {x}",), ("the person who started {x}",)),
    "owner": (("the owner of {x}",), ("the person who bought {x}",)),
    "seat": (("the seat of {x}",), ("the town where {x} is based",)),
    "author": (("the author of {x}",), ("the person who wrote {x}",)),
    "editor": (("the editor of {x}",), ("the person who prepared {x} for print",)),
    "venue": (("the venue of {x}",), ("the town that hosted {x}",)),
    "region": (("the region of {x}",), ("the region that {x} lies in",)),
    "capital": (("the capital of {x}",), ("the town that {x} is ruled from",)),
}

COMPARE = {"birth year": "Who is older, {a} or {b}?", "opening year": "Which is older, {a} or {b}?"}
