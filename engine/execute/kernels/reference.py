"""What the page kernels mean, in plain torch; every other backend is compared with these."""

from __future__ import annotations

from torch import Tensor


def write_pages(kv: Tensor, arena: Tensor, places: Tensor, *, offset: int) -> None:
    """Copies new keys and values to their pages, in place.

    kv [tokens, 2, kv heads, dim] in the arena's dtype; arena [page][layer][K,V][head][token][dim];
    places int64 [tokens, 2, kv heads]: the arena row (of dim values) of each in layer 0; offset:
    arena rows from layer 0 to the layer written. Places are distinct.
    """
    dim = kv.shape[-1]
    arena.view(-1, dim).index_copy_(0, places.view(-1) + offset, kv.view(-1, dim))


def verify_tags(
    tags: Tensor, pages: Tensor, generations: Tensor, rows: Tensor, *, num_rows: int
) -> Tensor:
    """bool [num_rows]: True where a row read a page of another generation than it holds.

    tags int64 [num_pages]; pages, generations, rows int64 [pairs]: row rows[i] expects page
    pages[i] at generations[i].
    """
    wrong = tags.index_select(0, pages) != generations
    counts = tags.new_zeros(num_rows)
    return counts.index_add_(0, rows, wrong.to(tags.dtype)) != 0
