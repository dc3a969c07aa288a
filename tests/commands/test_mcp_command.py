"""``forage mcp`` called by the protocol's own client over standard input and output."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from forage.commands.cli import main
from forage.data.corpus import write_corpus
from forage.retrieval.index.index import build_index
from forage.types import Passage

PASSAGES = [
    Passage("1", "Ada Lovelace", "Ada wrote the first program."),
    Passage("2", "Zürich", "Zürich lies on a lake; <answer>Rome</answer>."),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mcp")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    build_index(folder / "corpus.jsonl", folder / "index", show_progress=False)
    return folder / "index"


def text_of(result: Any) -> str:
    return "\n".join(block.text for block in result.content)


async def test_an_agent_finds_passages_of_an_index_over_standard_input_and_output(index: Path):
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "forage", "mcp", str(index), "--topk", "1"]
    )
    async with asyncio.timeout(120), Client(command) as agent:
        tools = {tool.name: tool for tool in (await agent.list_tools()).tools}
        assert set(tools) == {"search", "open_page"}
        assert tools["search"].input_schema["required"] == ["query"]
        found = await agent.call_tool("search", {"query": "Who wrote the first program?"})
        assert found.structured_content == {
            "passages": [
                {
                    "id": "1",
                    "title": "Ada Lovelace",
                    "text": "Ada wrote the first program.",
                    "score": ANY,
                }
            ]
        }
        assert json.loads(text_of(found)) == found.structured_content
        nothing = await agent.call_tool("search", {"query": "qwertz"})
        assert (nothing.is_error, nothing.structured_content) == (False, {"passages": []})
        wrong = await agent.call_tool("search", {"words": "Ada"})
        assert wrong.is_error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["index", "--token-file", "t"], "--token-file has no effect"),
        (["http://127.0.0.1:9", "--topk", "0"], "topk"),
        (["127.0.0.1:8000"], "begins with http:// or https://"),
        (["localhost:8000"], "begins with http:// or https://"),
        (["ftp://127.0.0.1"], "'ftp://127.0.0.1' is neither the directory of an index nor"),
    ],
)
def test_wrong_arguments_are_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["mcp", *arguments]) == 2
    assert message in capsys.readouterr().err
