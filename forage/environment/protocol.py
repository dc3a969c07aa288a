"""The two ways in which a policy acts and is answered: tags in its own text, or native tool calls.

A protocol says what ends a turn, what a turn means, and what stands around the reply. The episode
asks it and nothing else, so both are played by the same code.
"""

from __future__ import annotations

from typing import Literal

from forage.environment import actions
from forage.environment.actions import Answer, Invalid, Search
from forage.environment.chat import Glue, ToolSchema, derive_glue
from forage.environment.codec import Codec
from forage.environment.observation import Frame, information_frame
from forage.environment.tools import CALL_OPEN, derive_tool


class TagsProtocol:
    """Search-R1's: everything happens in one message of the assistant.

    A turn that ended that message (with an end-of-turn token, and so without an action) is
    answered by a message of the user, as the chat template writes one.
    """

    name = "tags"
    tags = ("think", "search", "information", "answer")
    action_tags = ("search", "answer")
    stop = actions.STOP_STRINGS
    tools: tuple[ToolSchema, ...] = ()
    invalid_message = actions.INVALID_ACTION_MESSAGE

    def __init__(self, codec: Codec) -> None:
        self._results = information_frame(codec)
        self._user = derive_glue(codec, "user") if codec.tokenizer.chat_template else None

    def parse(self, text: str) -> Search | Answer | Invalid:
        return actions.parse_action(text)

    def write_search(self, query: str) -> str:
        """A search as a policy writes it."""
        # A space before the query: most tokenizers then write a name as they do in passages.
        return f"{actions.SEARCH_OPEN} {query}{actions.SEARCH_CLOSE}"

    def results_frame(self, last_id: int) -> Frame:
        """What stands around passages behind a turn whose last token is ``last_id``."""
        del last_id
        return self._results

    def message_frame(self, last_id: int) -> Frame | None:
        """What stands around the message after an invalid action; None where nothing does."""
        if self._user is not None and last_id in self._user.end_ids:
            return self._user.after_end
        return None

    def frames(self) -> list[Frame]:
        """Every frame that may be needed, to check a budget against."""
        return [self._results, *(_both(self._user) if self._user else [])]


class ToolsProtocol:
    """Native tool calls through the chat template; the answer stands in answer tags."""

    name = "tools"

    def __init__(self, codec: Codec) -> None:
        """Raises ``UserError`` for a tokenizer whose chat template knows no tools."""
        self._tool = derive_tool(codec)
        self._results = derive_glue(codec, "tool", [self._tool.schema])
        self._user = derive_glue(codec, "user", [self._tool.schema])
        has_tags = self._tool.spelling == "hermes"
        self.tags = ("think", "answer", *(("tool_call", "tool_response") if has_tags else ()))
        self.action_tags = ("answer", *((CALL_OPEN.strip("<>"),) if has_tags else ()))
        self.stop = self._tool.stop
        self.tools = (self._tool.schema,)
        self.invalid_message = (
            "That was no valid action. To search, call the tool, for example "
            f"{self._tool.write('query')}. To answer, write {actions.ANSWER_OPEN} answer "
            f"{actions.ANSWER_CLOSE}. Try again."
        )

    def parse(self, text: str) -> Search | Answer | Invalid:
        return self._tool.parse(text)

    def write_search(self, query: str) -> str:
        """A call of the tool as a policy writes it, with the same space."""
        return self._tool.write(f" {query}")

    def results_frame(self, last_id: int) -> Frame:
        """What stands around passages behind a turn whose last token is ``last_id``."""
        return self._results.frame(last_id)

    def message_frame(self, last_id: int) -> Frame:
        """What stands around the message after an invalid action."""
        return self._user.frame(last_id)

    def frames(self) -> list[Frame]:
        """Every frame that may be needed, to check a budget against."""
        return [*_both(self._results), *_both(self._user)]


TurnProtocol = TagsProtocol | ToolsProtocol


def make_protocol(name: Literal["tags", "tools"], codec: Codec) -> TurnProtocol:
    """The protocol of ``environment.protocol``; raises ``UserError``."""
    return TagsProtocol(codec) if name == "tags" else ToolsProtocol(codec)


def _both(glue: Glue) -> list[Frame]:
    return [glue.after_end, glue.after_cut]
