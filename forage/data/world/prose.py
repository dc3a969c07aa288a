"""The wording of the generated encyclopedia: articles, questions and the names of relations.

Templates only; which facts exist is decided in ``world.py``. Every kind of sentence comes in
several wordings, so that a fact is found by reading and not by its position. An article calls a
relation by the noun that ``ASK`` and ``REFER`` are keyed by; most questions do not.
"""

from __future__ import annotations

OCCUPATIONS = (
    "baker", "potter", "weaver", "miller", "tailor", "painter", "sailor", "farmer", "lawyer",
    "singer", "banker", "carver", "printer", "poet", "doctor", "pilot", "mason", "dancer",
    "hunter", "fisher", "barber", "teacher", "judge", "clerk",
)  # fmt: skip

PRODUCTS = (
    "salt", "silk", "honey", "cheese", "bells", "paper", "pears", "amber", "clocks", "lamps",
    "boats", "tea", "linen", "copper", "marble", "apples", "mirrors", "candles", "pepper",
    "horses", "ink", "gloves", "masks", "soap",
)  # fmt: skip

GENRES = ("novel", "poem", "play", "ballad")
TRADES = ("paper", "trading", "shipping", "mining")

ARTICLES: dict[str, tuple[str, ...]] = {
    "person": (
        "{name} had the occupation {occupation} and the birthplace {birthplace}.",
        "{name} left the birthplace {birthplace} for the occupation {occupation}.",
        "Of {name} we know the birthplace {birthplace} and the occupation {occupation}.",
        "With the occupation {occupation}, {name} came from the birthplace {birthplace}.",
    ),
    "town": (
        "Proud of its product {product}, {name} is a town of the region {region}.",
        "The town {name} sells its product {product} all over the region {region}.",
        "{name} lies in the region {region} and lives off the product {product}.",
    ),
    "region": (
        "{name} is wide; its largest town is {capital}.",
        "The largest town in {name} is {capital}.",
    ),
    "company": (
        "{name} is a {trade} company with the founder {founder} and the seat {seat}.",
        "{name} never left its seat {seat}, nor did the founder {founder}.",
        "The founder {founder} gave {name} its seat {seat}.",
    ),
    "work": (
        "{name} is a {genre} by the author {author}.",
        "{name} made its author {author} known in {year}.",
        "In {year} the author {author} finished {name}.",
    ),
    "event": (
        "{name} was held in {year} at the venue {venue}.",
        "The venue {venue} is still proud of {name}.",
        "{name} filled its venue {venue} in {year}.",
    ),
}

FILLERS: dict[str, tuple[str, ...]] = {
    "person": (
        "{name} travelled with {other}.",
        "{other} was a friend.",
        "A street bears the name.",
    ),
    "town": (
        "The road to {other} starts here.",
        "A bridge was built in {year}.",
        "It has a market.",
    ),
    "region": ("It is dry in summer.", "It borders {other}."),
    "company": ("It competes with {other}.", "It opened in {year}."),
    "work": ("It is often compared with {other}.", "Critics were kind."),
    "event": ("Few people came.", "It was planned like {other}."),
}
FILLER_SHARE = 0.4

ASK: dict[str, tuple[str, ...]] = {
    "birthplace": ("Where was {x} born?", "What is the birthplace of {x}?"),
    "occupation": ("What was the occupation of {x}?", "What did {x} work as?"),
    "founder": ("Who founded {x}?", "Who is the founder of {x}?"),
    "seat": ("Where is {x} based?", "In which town is {x} based?"),
    "author": ("Who wrote {x}?", "Who is the author of {x}?"),
    "venue": ("Where was {x} held?", "Which town hosted {x}?"),
    "region": ("In which region is {x}?", "Which region is {x} in?"),
    "product": ("What is {x} known for?", "What does {x} make?"),
}

REFER: dict[str, tuple[str, ...]] = {
    "birthplace": ("the birthplace of {x}", "the town where {x} was born"),
    "founder": ("the founder of {x}", "the person who founded {x}"),
    "seat": ("the seat of {x}", "the town where {x} is based"),
    "author": ("the author of {x}", "the person who wrote {x}"),
    "venue": ("the town that hosted {x}", "the town where {x} was held"),
}
