"""Four coding agents with one long system prompt, each in a conversation of its own.

The shape is that of agent traffic: a system prompt with the descriptions of many tools, shared by
all; a file that each agent reads first; then short turns that resend everything before them.
All text is made here from word lists, so that every run has the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_AGENTS = 4
NUM_TURNS = 5  # at most: questions have so many nouns
COMPLETION_TOKENS = 8
# Two agents' conversations (28 pages each at their end) fit beside the shared prefix (40 pages),
# with some room; four do not.
POOL_TOKENS = 108 * 64

VERBS = (
    *("read", "write", "search", "list", "move", "copy"),
    *("compare", "format", "check", "build", "rename"),
)
NOUNS = ("file", "folder", "branch", "commit", "test")
AGENTS = ("harbour", "lantern", "anchor", "compass")
AREAS = ("parser", "scheduler", "storage", "network")

Message = dict[str, str]


def system_prompt() -> str:
    """A little over 2,500 tokens: who the agent is, and its tools."""
    lines = [
        "You are a careful coding agent in a shared repository. You work in small steps, you read",
        "before you write, and you answer in one short sentence. You never guess a path, you say",
        "what you changed and why, and you leave a file as you found it when a test fails. These",
        "are your tools.",
    ]
    lines += [
        f"Tool {verb}_{noun}: {verb} one {noun} of the repository. Give the path of the "
        f"{noun}, relative to its root. It returns the {noun} as text, or the reason why "
        f"it could not {verb} the {noun} at this time."
        for verb in VERBS
        for noun in NOUNS
    ]
    return "\n".join(lines)


def first_file(agent: int) -> str:
    """About 1,200 tokens that only this agent has read."""
    name, area = AGENTS[agent], AREAS[agent]
    lines = [f"Here is the {area} of the {name} service. Say what it is for."]
    lines += [
        f"def {verb}_{noun}({area}, {name}): return {area}.{verb}({name}.{noun}, "
        f"owner={name!r})  # {verb} the {noun} for the {area}"
        for verb in VERBS[:10]
        for noun in NOUNS[:4]
    ]
    return "\n".join(lines)


def next_question(agent: int, turn: int) -> str:
    """About 100 tokens: what a tool returned and what is wanted next. turn counts from 1."""
    verb, noun, area = VERBS[turn + agent], NOUNS[turn - 1], AREAS[agent]
    return (
        f"The tool {verb}_{noun} returned: the {area} has a {noun} that nobody uses since the last "
        f"change, two callers still name it, and the tests of the {area} pass without it. "
        f"Someone asked whether to {verb} the {noun} now or after the release, and who should be "
        f"told about it. What do you do with the {noun} of the {area} next?"
    )


def turn_order(turn: int) -> list[int]:
    """Agents in the order in which they speak in a turn: it shifts, as independent agents' would.

    In a fixed order an even number of agents over two nodes would have affinity by accident.
    """
    return [(turn + place) % NUM_AGENTS for place in range(NUM_AGENTS)]


@dataclass
class Conversation:
    """One agent's messages so far; each turn resends them all."""

    agent: int
    messages: list[Message] = field(default_factory=list)

    @property
    def name(self) -> str:
        return AGENTS[self.agent]

    def ask(self, turn: int) -> list[Message]:
        """The messages to send in this turn, which counts from 1."""
        if turn == 1:
            self.messages = [
                {"role": "system", "content": system_prompt()},
                {"role": "user", "content": first_file(self.agent)},
            ]
        else:
            self.messages.append({"role": "user", "content": next_question(self.agent, turn - 1)})
        return self.messages

    def hear(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
