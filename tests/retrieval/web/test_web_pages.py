import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage.retrieval.web.fetch import Fetched
from forage.retrieval.web.web_pages import MAX_TEXT_CHARS, TextExtractor, passage_around

ARTICLE = """<!doctype html><html><head><title>Ada</title><script>var tracking = 1;</script></head>
<body><nav><ul><li><a href="/">Home</a></li><li><a href="/login">Log in</a></li></ul></nav>
<article><h1>Ada Lovelace</h1><p>Ada Lovelace was an English mathematician and writer, known for
her work on the analytical engine, a general-purpose computer proposed by Charles Babbage.</p>
<p>Her notes of 1843 hold what many take to be the first published algorithm.</p></article>
<footer>Copyright nobody. Cookie settings.</footer></body></html>"""


@pytest.fixture(scope="module")
def extractor() -> TextExtractor:
    return TextExtractor()


def fetched(body: bytes | str, charset: str | None = "utf-8", is_html: bool = True) -> Fetched:
    data = body if isinstance(body, bytes) else body.encode()
    return Fetched("https://example.org/ada", data, is_html, charset)


def test_the_article_is_read_and_what_surrounds_it_is_not(extractor: TextExtractor):
    text = extractor.text(fetched(ARTICLE))
    assert "English mathematician" in text
    assert "first published algorithm" in text
    assert not any(word in text for word in ("tracking", "Log in", "Cookie", "<p>"))


def test_the_charset_of_the_reply_is_used(extractor: TextExtractor):
    page = ARTICLE.replace("Babbage", "Бэббидж")
    assert "Бэббидж" in extractor.text(fetched(page.encode("koi8-r", "replace"), "koi8-r"))
    assert "Бэббидж" in extractor.text(fetched(page.encode(), None))
    assert "English" in extractor.text(fetched(ARTICLE, "no-such-charset"))


def test_plain_text_is_taken_as_it_is_and_cut(extractor: TextExtractor):
    assert extractor.text(fetched("a <b> c\n", is_html=False)) == "a <b> c"
    assert extractor.text(fetched(b"\xff\xfe", None, is_html=False)) == "\ufffd\ufffd"
    long = extractor.text(fetched("x" * (MAX_TEXT_CHARS + 9), is_html=False))
    assert len(long) == MAX_TEXT_CHARS


@pytest.mark.parametrize(
    "body",
    ["", "<", "\0" * 1000, "<html></html>", "<div>" * 20_000, "<p>x" * 5_000, "<!--" * 9999],
    ids=["empty", "cut", "zeros", "bare", "deep", "many", "comments"],
)
def test_hostile_markup_gives_some_text_or_none_but_no_crash(extractor: TextExtractor, body: str):
    assert isinstance(extractor.text(fetched(body)), str)


TEXT = " ".join(f"word{i}" for i in range(1000))


@pytest.mark.parametrize(
    ("snippet", "first", "last"),
    [
        ("nothing of this page", "word0", "word9"),
        ("", "word0", "word9"),
        ("word500 word501", "word495", "word506"),
        ("WORD500 word501", "word495", "word506"),
        ("gone ... word500 word501 … gone too", "word495", "word506"),
        ("word3 ... word500 word501", "word495", "word506"),
        ("word998 word999", "word989", "word999"),
        ("word0 word1", "word0", "word9"),
    ],
)
def test_a_passage_lies_around_its_snippet(snippet: str, first: str, last: str):
    words = passage_around(snippet, TEXT, 100).split()
    assert words[0] in TEXT.split()
    assert abs(int(words[0][4:]) - int(first[4:])) <= 2
    assert abs(int(words[-1][4:]) - int(last[4:])) <= 5


@given(snippet=st.text(), text=st.text(), size=st.integers(1, 60))
def test_a_passage_is_a_part_of_the_page_no_longer_than_asked(snippet: str, text: str, size: int):
    passage = passage_around(snippet, text, size)
    assert len(passage) <= size
    assert passage in " ".join(text.split()) or passage in text


def test_a_short_page_is_taken_whole():
    assert passage_around("b", "a  b\nc", 5) == "a b c"
