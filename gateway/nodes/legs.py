"""The prefill half of a split request: a lane on another node's link that brings no tokens.

It lives until that node's terminal event for it. Its end tells that decode has all, or that the
pair has failed; tokens, usage and the answer's end come from the decode node alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.backlog import Credit

if TYPE_CHECKING:
    from gateway.nodes.engines import Engine
    from gateway.nodes.session import Session
    from gateway.nodes.streams import Flow


class Leg:
    """Of one attempt of one flow; `engine` and the credits are as a Flow's."""

    __slots__ = (
        "attempt",
        "credit",
        "dispatch",
        "engine",
        "flow",
        "keys",
        "node_id",
        "number",
        "session",
    )

    def __init__(self, flow: Flow, node_id: str) -> None:
        self.flow = flow
        self.dispatch = flow.dispatch
        self.node_id = node_id
        self.attempt = flow.attempt
        self.keys = flow.keys
        self.number = -1  # its lane on the link of `session`
        self.session: Session | None = None  # None: it ended, or was told to
        self.engine: Engine | None = None
        self.credit: Credit | None = None

    def computed(self) -> None:
        """Decode told the first token: the prompt's pages are here too."""
        self.release()
        if self.engine is not None:
            self.engine.residency.expect(self.keys)

    def stop(self) -> None:
        """Nobody waits for it: tell the node, and count its prompt as work no more. Idempotent."""
        session, self.session = self.session, None
        if session is not None:
            session.abort_leg(self)
        self.release()

    def release(self) -> None:
        if self.engine is not None:
            self.engine.release(self)
