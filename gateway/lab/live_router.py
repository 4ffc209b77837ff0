"""The gateway's own choice of a node, by the live policy, for modelled nodes."""

from __future__ import annotations

from gateway.lab.view import NodeView, View
from gateway.lab.workload import PAGE_TOKENS, Request
from policies.homes import Homes
from policies.routing import (
    Candidate,
    Decision,
    Reach,
    RoutingParameters,
    Wanted,
    filter_candidates,
    pick,
    score,
)


class LiveRouter:
    """filter → score → pick, with sessions' homes. sees_pages=False: as with engines that tell of
    no pages and prompts without keys, so that only a session's own signal finds its cache."""

    def __init__(self, parameters: RoutingParameters, *, sees_pages: bool = True) -> None:
        self._parameters = parameters
        self._sees_pages = sees_pages
        self._homes = Homes(parameters.max_homes, parameters.home_idle_s)

    def choose(self, view: View, request: Request, now: float) -> tuple[int, int]:
        """(index of the node, its tokens to compute as far as is known)."""
        decision = self.decide(view, request, now)
        index = int(decision.chosen.candidate.node_id)
        if request.has_signal:
            self._homes.settle(
                _session_key(request), str(index), now, prompt_pages=len(request.keys)
            )
        return index, decision.chosen.uncached_tokens

    def decide(self, view: View, request: Request, now: float) -> Decision:
        keys = request.keys[::-1]
        most = request.max_hit_pages
        kept, rejected = filter_candidates([self._candidate(one, now) for one in view.nodes])
        home = self._homes.look(_session_key(request), now) if request.has_signal else None
        wanted = Wanted(
            prompt_tokens=request.prompt_tokens,
            hash_key=_session_key(request),
            home=None if home is None else home.node_id,
            has_affinity_key=request.has_signal,
            home_tokens=0 if home is None else home.prompt_pages * PAGE_TOKENS,
            page_keys=() if request.has_signal else keys,
            page_tokens=PAGE_TOKENS,
        )

        def reach(candidate: Candidate) -> list[Reach]:
            if not self._sees_pages:
                return []
            one = view.nodes[int(candidate.node_id)]
            seconds = one.seconds_by_tier
            return [
                Reach(min(most, depth) * PAGE_TOKENS, seconds[tier])
                for tier, depth in one.reach(keys)
            ]

        scored = score(kept, wanted, reach, self._parameters)
        return pick(scored, wanted, rejected, self._parameters)

    def _candidate(self, one: NodeView, now: float) -> Candidate:
        one.follow(now)
        return Candidate(
            node_id=one.name,
            engine=0,
            state="ready",
            engine_ready=True,
            tried=False,
            in_flight=one.in_flight,
            max_in_flight=1 << 30,
            overloaded=False,
            backlog_tokens=one.backlog.tokens,
            tokens_per_s=one.node.measured_tokens_per_s,
            kv_share=one.node.kv_share,
            tells_pages=self._sees_pages,
        )


def _session_key(request: Request) -> bytes:
    return request.session.to_bytes(8, "little")
