"""A Forage recipe as an environment of verifiers (0.4 and later): questions, tools and reward.

    PYTHONPATH=examples vf-eval verifiers_environment --env.taskset.recipe recipe.yaml \\
        --env.agent.harness.id null --env.agent.runtime.type subprocess --model MODEL -n 5

The recipe's tools run in a separate process, which verifiers starts; the state of the rollout keeps
their results for the reward.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from mcp.server.mcpserver import MCPServer
from pydantic import Field

from forage.data.order import training_questions
from forage.doors.open_recipe import Message, OpenRecipe
from forage.doors.tool_function import described, given
from forage.environment.tools.tool import Tool
from forage.types import Question, Turn

__all__ = ["RecipeTaskset"]


class RecipeConfig(vf.TasksetConfig):
    recipe: str = "recipe.yaml"
    overrides: tuple[str, ...] = ()


class ToolsConfig(vf.SharedToolsetConfig):
    recipe: str = "recipe.yaml"
    overrides: tuple[str, ...] = ()
    directory: str = "."


class Calls(vf.State):
    made: list[Turn] = Field(default_factory=list)


class RecipeTools(vf.Toolset[ToolsConfig, Calls]):
    TOOL_PREFIX = None

    async def setup(self) -> None:
        os.chdir(self.config.directory)  # the recipe has relative paths
        recipe = OpenRecipe(self.config.recipe, *self.config.overrides)
        self.recipe = await self._exit_stack.enter_async_context(recipe)

    def register(self, mcp: MCPServer) -> None:
        for tool in self.recipe.tools:
            call = self._with_state(described(self._caller(tool), tool))
            mcp.add_tool(call, name=tool.name, description=tool.description)

    def _caller(self, tool: Tool) -> Callable[..., Awaitable[str]]:
        async def call(**arguments: Any) -> str:
            return await self.recipe.call(tool.name, given(arguments, tool), self.state.made)

        return call


class RecipeData(vf.TaskData):
    question: Question
    recipe: str
    overrides: tuple[str, ...]


class RecipeTask(vf.Task[RecipeData, Calls]):
    @vf.reward
    async def recipe_reward(self, trace: vf.Trace[RecipeData, Calls]) -> float:
        recipe = recipe_of(self.data.recipe, *self.data.overrides)
        messages = policy_messages(trace)
        episode = await recipe.score(self.data.question, messages, trace.state.made)
        assert episode.reward is not None, "it was scored"
        trace.record_metrics(episode.reward.parts)
        if not recipe.counts(episode):  # an error, so the rollout is not trained on
            raise RuntimeError(f"{episode.status}: a call failed; Forage excludes such an episode")
        return episode.reward.value


class RecipeTaskset(vf.Taskset[RecipeTask, RecipeConfig]):
    def load(self) -> Iterable[RecipeTask]:
        path, overrides = self.config.recipe, self.config.overrides
        recipe = recipe_of(path, *overrides)
        questions, _ = training_questions(recipe.config.data, recipe.config.seed)
        for question in questions:
            shared = {"question": question, "recipe": path, "overrides": overrides}
            yield RecipeTask(RecipeData(prompt=recipe.prompt(question), **shared))

    @classmethod
    def toolsets(cls, config: RecipeConfig) -> list[vf.Toolset]:
        given_here = {"recipe": config.recipe, "overrides": config.overrides}
        return [RecipeTools(ToolsConfig(**given_here, directory=os.getcwd()))]


@cache
def recipe_of(path: str, *overrides: str) -> OpenRecipe:
    """The recipe, read once per process."""
    return OpenRecipe(path, *overrides)


def policy_messages(trace: vf.Trace[Any, Any]) -> list[Message]:
    """The policy's messages, each with the number of its calls that were answered."""
    answered = {message.tool_call_id for message in trace.tool_messages}
    found: list[Message] = []
    for said in trace.assistant_messages:
        text = said.content or ""
        if said.reasoning_content:
            text = f"<think>\n{said.reasoning_content}\n</think>\n\n{text}"
        calls = said.tool_calls or []
        made = tuple((call.name, arguments_of(call.arguments)) for call in calls)
        found.append(Message(text, made, sum(call.id in answered for call in calls)))
    return found


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call; none if it is not a JSON object, which verifiers has reported."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


if __name__ == "__main__":
    RecipeTools.run()
