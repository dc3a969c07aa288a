"""The wording of the generated encyclopedia: articles, questions and the names of relations.

Templates only; which facts exist is decided in ``world.py``. Every kind of sentence comes in
several wordings, so that a fact is found by reading and not by its position.
"""

from __future__ import annotations

OCCUPATIONS = (
    "baker", "potter", "weaver", "miller", "tailor", "painter", "sailor", "farmer", "lawyer",
    "singer", "banker", "carver", "printer", "poet", "doctor", "pilot", "mason", "tanner",
    "dancer", "hunter", "glazier", "fisher", "cooper", "saddler", "barber", "gardener", "teacher",
    "judge", "smith", "clerk", "sculptor", "surveyor", "ropemaker", "brewer", "chemist", "drummer",
)  # fmt: skip

PRODUCTS = (
    "salt", "silk", "honey", "cheese", "bells", "paper", "pears", "amber", "clocks", "carpets",
    "lamps", "boats", "tea", "linen", "copper", "marble", "apples", "violins", "mirrors", "candles",
    "pepper", "horses", "tulips", "ink", "plums", "barley", "gloves", "kites", "masks", "soap",
    "glass", "wool", "rope", "coral", "figs", "drums",
)  # fmt: skip

GENRES = ("novel", "poem", "play", "ballad")
TRADES = ("paper", "trading", "shipping", "mining")

ARTICLES: dict[str, tuple[str, ...]] = {
    "person": (
        "{name} was a {occupation} born in {birthplace}.",
        "Born in {birthplace}, {name} worked as a {occupation}.",
        "{name} worked as a {occupation} and was born in {birthplace}.",
        "{name} came from {birthplace} and was a {occupation}.",
    ),
    "town": (
        "{name} is a town in {region}, known for {product}.",
        "Known for {product}, {name} is a town in {region}.",
        "{name} lies in {region} and is known for {product}.",
        "The town of {name} makes {product} and lies in {region}.",
    ),
    "region": (
        "{name} is a region whose largest town is {capital}.",
        "The largest town in the region of {name} is {capital}.",
    ),
    "company": (
        "{name} is a {trade} company based in {seat}, founded by {founder}.",
        "{name} was founded by {founder} and is based in {seat}.",
        "Founded by {founder}, {name} is a {trade} company based in {seat}.",
    ),
    "work": (
        "{name} is a {genre} written by {author}.",
        "{name} was written by {author} in {year}.",
        "The {genre} {name} is the work of {author}.",
    ),
    "event": (
        "{name} was held in {venue} in {year}.",
        "In {year} the town of {venue} hosted {name}.",
        "{name} took place in {venue}.",
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
