"""Purges under way: a tenant's pages leave the device at once, the slower tiers in their time."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.schedule.orders import OrderDone, OrderNews
from engine.schedule.scheduler import Scheduler
from engine.store.tier import Status
from policies.contract.page_keys import owner_tag
from policies.contract.wire import Purge, PurgeResult, Tier

PURGE_S = 10.0  # what has not answered by then is `left`


@dataclass(slots=True)
class _Purge:
    channel: int
    purge_id: str
    pages: int
    waiting: dict[int, Tier]  # by order id
    deadline: float
    left: list[Tier] = field(default_factory=list)


class Purges:
    """Answers each Purge once: when every tier has answered, or at its deadline."""

    def __init__(self, scheduler: Scheduler, engine: int) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._under_way: list[_Purge] = []

    def begin(self, channel: int, purge: Purge, now: float) -> None:
        owner, deadline = owner_tag(purge.salt), now + PURGE_S
        pages = self._scheduler.purge(owner)
        stored, orders = self._scheduler.tiers.purge(owner, deadline)
        self._under_way.append(_Purge(channel, purge.purge_id, pages + stored, orders, deadline))

    def take(self, news: OrderNews) -> None:
        if not isinstance(news, OrderDone):
            return
        for purge in self._under_way:
            tier = purge.waiting.pop(news.order_id, None)
            if tier is not None and news.statuses != (Status.OK,):
                purge.left.append(tier)

    def take_results(self, now: float) -> list[tuple[int, PurgeResult]]:
        """(channel, result) of those that are over."""
        if not self._under_way:
            return []
        over = [purge for purge in self._under_way if not purge.waiting or purge.deadline <= now]
        self._under_way = [purge for purge in self._under_way if purge not in over]
        return [
            (
                purge.channel,
                PurgeResult(
                    self._engine,
                    purge.purge_id,
                    purge.pages,
                    (*purge.left, *purge.waiting.values()),
                ),
            )
            for purge in over
        ]
