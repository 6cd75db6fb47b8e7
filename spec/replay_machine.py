"""The specification's machine, driven by a step trace.

A trace does not contain the contents of blocks, so this machine has none: keys still identify exact
prefixes, but interned instead of encoded, because real prompts are long.
"""

from __future__ import annotations

from . import model
from .model import Machine
from .state import Piece, Plan, Request, Row, Scope, pieces


class ReplayMachine(Machine):
    """The specification's machine for one run, without contents; its tokens are the trace's."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(model.initial(scope), scope)
        self.stop_ids: list[frozenset[int]] = []
        self.watches_text: list[bool] = []
        self.traced_reasons: dict[int, str] = {}
        self.traced_accepted: dict[int, int] = {}  # draft tokens, of the step that is settled
        self._num_settled: dict[int, int] = {}  # tokens of each request before its row is settled
        self._names: dict[tuple[int, tuple[int, ...], tuple[Piece, ...]], int] = {}
        self._chains: dict[int, list[int]] = {}

    def block_key(self, request: Request, i: int) -> int:
        chain = self._chains.setdefault(request.rank[1], [])
        for block in range(len(chain), i + 1):
            parent = chain[-1] if chain else -1 - request.salt
            begin = block * self.block_size
            end = begin + self.block_size
            name = (parent, request.tokens[begin:end], pieces(request.segments, begin, end))
            chain.append(self._names.setdefault(name, len(self._names)))
        return chain[i]

    def clear_contents(self, block: int) -> None:
        pass

    def dispatch(self, plan: Plan, _tokens: tuple[int, ...]) -> None:
        self.left.clear()  # the runner's view is read from the trace instead
        self.flight.append(
            tuple(
                Row(row.request, row.start, row.n, (0,) * row.num_samples, (), drafts=row.drafts)
                for row in plan.rows
            )
        )

    def settle_row(self, row: Row) -> None:
        self._num_settled[row.request] = len(self.requests[row.request].tokens)
        super().settle_row(row)

    def finish_reason(self, r: int) -> str:
        request = self.requests[r]
        if request.tokens[-1] in self.stop_ids[r]:
            return "stop"
        # Only the engine reads text, so the trace determines whether a stop string was met, and
        # after which accepted draft. The same holds for a sample that cannot be taken.
        traced = self.traced_reasons.get(r)
        if traced == "error" or (self.watches_text[r] and traced == "stop"):
            num_taken = len(request.tokens) - self._num_settled[r]
            if num_taken == 1 + self.traced_accepted.get(r, 0):
                return traced
        return "length" if len(request.tokens) >= request.limit else ""
