"""A side for ``test_anchors.py``, which a process of its own imports."""

from benchmarks.anchors.talk import Talk


def answer(talk: Talk, rate: float) -> None:
    talk.ready(rate=rate)
    for number, request in enumerate(talk.requests()):
        talk.reply(value=rate * request["factor"], round=number)
