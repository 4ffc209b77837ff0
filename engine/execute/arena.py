"""The device tier's memory: one tensor of pages, a page of zeros behind them, a tag for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.execute.host_memory import zeros
from engine.store.page_codec import SCALE_BYTES, PageLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of values that are no codes


class Arena:
    """[page][layer][K,V][kv head][token][dim]; a page is one contiguous run of bytes. In quantised
    ones a head is uint8 [head_bytes]: codes, then scales.

    The page behind the last, null_page, stays zero: what is masked still enters sums as 0 × value
    and must be finite. tags int64 [num_pages] holds the generation at which a page was assigned.
    """

    def __init__(self, layout: PageLayout, num_pages: int, *, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = self.null_page = num_pages
        values = layout.page_size, layout.head_dim
        shape = (
            *(num_pages + 1, layout.num_layers, 2, layout.num_kv_heads),
            *((layout.head_bytes,) if layout.is_quantised else values),
        )
        # Tiers and transfers write here too, outside of any inference mode.
        with torch.inference_mode(False):
            dtype = torch.uint8 if layout.is_quantised else DTYPES[layout.precision]
            self.pages = (
                zeros(*shape, dtype=dtype)
                if device.type == "cpu"
                else torch.zeros(shape, dtype=dtype, device=device)
            )
            self.tags = torch.zeros(num_pages, dtype=torch.int64, device=device)
            # What a head holds of its tokens, each a view [page][layer][K,V][kv head][token][…].
            self.by_token = [self.pages]
            if layout.is_quantised:
                at = layout.codes_bytes
                codes, scales = self.pages[..., :at], self.pages[..., at:]
                self.by_token = [
                    codes.view(*shape[:-1], *values),
                    scales.view(*shape[:-1], layout.page_size, SCALE_BYTES),
                ]
        # On a CPU the same memory: a few words cost less this way than a tensor op does.
        self._tags = memoryview(self.tags.cpu().numpy())  # type: ignore[arg-type]

    def assign(self, assigned: Sequence[tuple[int, int]]) -> None:
        """(page_id, generation) pairs: from now on these pages belong to these generations."""
        if assigned:
            pairs = torch.tensor(assigned, device=self.tags.device)
            self.tags.index_copy_(0, pairs[:, 0], pairs[:, 1])
            if self.tags.device.type != "cpu":
                for page_id, generation in assigned:
                    self._tags[page_id] = generation

    def generation(self, page_id: int) -> int:
        """What a page's tag says, from the host's copy of the tags."""
        return int(self._tags[page_id])

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """(source, target) page ids, one after the other."""
        for source, target in pairs:
            self.pages[target].copy_(self.pages[source])

    def zero_tails(self, tails: Sequence[tuple[int, int]]) -> None:
        """(page_id, first unwritten offset): what an earlier owner left there is wiped."""
        for page_id, offset in tails:
            for part in self.by_token:
                part[page_id, :, :, :, offset:].zero_()

    def foreign(self, page_ids: Iterable[int], generations: Sequence[int]) -> bool:
        """Whether a page belongs to another generation than it is held at; of an arena on a CPU."""
        return [*map(self._tags.__getitem__, page_ids)] != generations

    def bytes_of(self, page_id: int) -> memoryview:
        """A page's bytes, a view for an arena on the CPU and a copy otherwise."""
        page = self.pages[page_id].view(torch.uint8).view(-1).cpu()
        return memoryview(page.numpy())  # type: ignore[arg-type]

    def load(self, page_id: int, payload: bytes | memoryview) -> None:
        """Bytes of the same layout become the page. Raises ValueError on another length."""
        if len(payload) != self.layout.page_bytes:
            raise ValueError(f"payload has {len(payload)} bytes, want {self.layout.page_bytes}")
        page = self.pages[page_id].view(torch.uint8).view(-1)
        page.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
