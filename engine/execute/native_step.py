"""A plan's rows as the CPU kernels take them: a few arrays, filled without a torch op."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.execute.kernels.cpu.library import Step
from engine.schedule.plan import Row


class NativeStep:
    """One step's arrays, in the order of the plan's rows; `step` points into them. context_tokens:
    of the longest row, from its sequence's start."""

    __slots__ = ("context_tokens", "first_tokens", "ids", "last", "num_rows", "pages", "positions",
                 "slots_page", "spans", "step")  # fmt: skip

    def __init__(
        self, rows: Sequence[Row], *, page_size: int, most_last: int, context_tokens: int
    ) -> None:
        """most_last: of the sampling rows' last tokens, how many go through the head at once.
        context_tokens: the positions that rotary tables have; the kernels check none."""
        ids, positions, slots_page = array("I"), array("i"), array("i")
        spans, pages, last = array("i"), array("i"), array("i")
        first_tokens: list[int] = []
        reached = 0
        shift = page_size.bit_length() - 1
        for row in rows:
            first, start, count = len(ids), row.start, len(row.token_ids)
            (table,) = row.page_table
            reached = max(reached, start + count)
            first_tokens.append(first)
            spans.extend((first, count, start, len(pages)))
            pages.fromlist(table)
            ids += row.token_ids
            if count == 1:
                positions.append(start)
                slots_page.append(table[start >> shift])
            else:
                stop = start + count
                positions.extend(range(start, stop))
                for at in range(start >> shift, ((stop - 1) >> shift) + 1):
                    inside = min(stop, (at + 1) << shift) - max(start, at << shift)
                    slots_page += array("i", (table[at],)) * inside
            if row.samples and len(last) < most_last:
                last.append(first + count - 1)
        assert reached <= context_tokens, (
            f"position {reached - 1}, allowed up to {context_tokens - 1}"
        )
        self.context_tokens = reached
        self.ids, self.positions, self.slots_page = ids, positions, slots_page
        self.spans, self.pages, self.last = spans, pages, last
        self.first_tokens, self.num_rows = first_tokens, len(ids)
        self.step = Step(
            len(ids),
            len(rows),
            len(last),
            0,
            ids.buffer_info()[0],
            positions.buffer_info()[0],
            slots_page.buffer_info()[0],
            spans.buffer_info()[0],
            pages.buffer_info()[0],
            last.buffer_info()[0],
        )

    def take_ids(self, rows: Sequence[Row]) -> None:
        """The same rows' token ids anew: they were not known before."""
        for first, row in zip(self.first_tokens, rows, strict=True):
            self.ids[first : first + len(row.token_ids)] = row.token_ids

    def look_at(self, token_rows: Sequence[int]) -> None:
        """These rows go through the head next."""
        self.last = array("i", token_rows)
        self.step.num_last, self.step.last = len(self.last), self.last.buffer_info()[0]
