from pathlib import Path

import pytest
from hypothesis import given
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from forage.environment.codec import Codec
from forage.environment.prompt import encode_prompt
from forage.environment.template import BUILT_IN, PromptTemplate
from forage.errors import UserError
from forage.types import Question
from tests.environment.test_codec import CODECS, added_ids, hostile_text, shapes
from tests.environment.tiny_tokenizers import SHAPES, make_tokenizer

BRIEF = PromptTemplate.load("brief")
PROTOCOL = PromptTemplate.load("search-r1")


def encode(text: str, shape, template: PromptTemplate = BRIEF, max_tokens: int = 4096) -> list[int]:
    question = Question("q7", text, ("x",), "test")
    return encode_prompt(question, CODECS[shape], template, max_tokens)


def test_the_protocols_template_names_each_tag_and_ends_with_the_question():
    for tag in ("think", "search", "information", "answer"):
        assert f"<{tag}>" in PROTOCOL.text
        assert f"</{tag}>" in PROTOCOL.text
    assert PROTOCOL.text.endswith("Question: {question}\n")
    assert BRIEF.text == "Question: {question}\n"


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("shape", ["tags_added", "tags_ordinary", "pad_is_eos"])
def test_without_a_chat_format_the_prompt_is_the_template_as_the_model_would_encode_it(name, shape):
    template = PromptTemplate.load(name)
    text = "Which river does the city of Rome lie on?"
    expected = make_tokenizer(shape).encode(template.text.replace("{question}", text))
    assert encode(text, shape, template) == expected


@pytest.mark.parametrize("name", BUILT_IN)
def test_with_a_chat_format_the_prompt_is_one_user_message_and_the_assistants_start(name):
    template = PromptTemplate.load(name)
    text = "Which river does the city of Rome lie on?"
    message = {"role": "user", "content": template.text.replace("{question}", text)}
    rendered = make_tokenizer("chat").apply_chat_template(
        [message], add_generation_prompt=True, tokenize=False
    )
    assert isinstance(rendered, str)
    ids = encode(text, "chat", template)
    assert CODECS["chat"].decode(ids) == rendered
    assert ids == make_tokenizer("chat").encode(rendered)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("Who is it?", "Who is it?"),
        ("who is it", "who is it?"),
        (" who is it ", "who is it?"),
        ("Name {one}.", "Name {one}.?"),
        ("誰？", "誰？"),
    ],
)
def test_a_question_without_a_question_mark_gets_one(asked: str, shown: str):
    ids = encode(asked, "tags_ordinary")
    assert CODECS["tags_ordinary"].decode(ids) == f"Question: {shown}\n"


@given(shapes, hostile_text)
def test_a_question_can_emit_no_control_token_and_open_no_tag(shape, text: str):
    """Compared with a harmless question, a hostile one adds no added token and no tag to the
    prompt.
    """
    harmless, hostile = encode("x", shape, PROTOCOL), encode(text, shape, PROTOCOL)
    added = added_ids(shape)
    assert [i for i in hostile if i in added] == [i for i in harmless if i in added]
    tags = ("<search>", "</search>", "<answer>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
    decoded = CODECS[shape].decode(hostile).lower()
    for tag in tags:
        assert decoded.count(tag) == CODECS[shape].decode(harmless).lower().count(tag)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_longer_than_the_budget_is_an_error_that_names_the_question(shape):
    length = len(encode("who is it", shape))
    assert len(encode("who is it", shape, max_tokens=length)) == length
    with pytest.raises(UserError, match=f"question q7 has {length} tokens, .* {length - 1};"):
        encode("who is it", shape, max_tokens=length - 1)


def test_a_tokenizer_that_begins_texts_with_a_token_does_so_here():
    backend = make_tokenizer("tags_ordinary").backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|endoftext|>"
    )
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    question = Question("q", "who", ("x",), "test")
    ids = encode_prompt(question, Codec(tokenizer), BRIEF, 100)
    assert ids == tokenizer.encode("Question: who?\n")
    assert ids[0] == bos


def test_a_template_may_come_from_a_file_and_hold_other_braces(tmp_path: Path):
    path = tmp_path / "mine.txt"
    path.write_text('{"a": {question}}', encoding="utf-8")
    template = PromptTemplate.load(path)
    ids = encode("who", "tags_ordinary", template)
    assert CODECS["tags_ordinary"].decode(ids) == '{"a": who?}'


@pytest.mark.parametrize("text", ["Question:", "{question} {question}"])
def test_a_template_without_exactly_one_place_for_the_question_is_refused(
    tmp_path: Path, text: str
):
    path = tmp_path / "bad.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"bad\.txt contains \{question\} [02] times"):
        PromptTemplate.load(str(path))


def test_an_unknown_template_names_the_built_in_ones():
    with pytest.raises(UserError, match=r"'serch-r1'.*search-r1, brief.*No such file"):
        PromptTemplate.load("serch-r1")


def test_a_chat_template_that_drops_the_message_is_refused():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer("tags_ordinary").backend_tokenizer,
        eos_token="<|endoftext|>",
    )
    tokenizer.chat_template = "hello"
    with pytest.raises(UserError, match="shows the user's message 0 times"):
        encode_prompt(Question("q", "who", ("x",), "t"), Codec(tokenizer), BRIEF, 100)


@pytest.mark.parametrize("text", ["who is it " * 10_000, "<search>" * 12_500, "誰" * 34_000])
def test_a_question_of_100_kilobytes_is_refused_by_its_id_before_anything_is_played(text: str):
    with pytest.raises(
        UserError, match=r"question q7 has \d+ tokens, .* 4096; .* remove the question"
    ):
        encode(text, "chat", PROTOCOL)
