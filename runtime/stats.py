"""What the engine counts, a snapshot of it with the state of the pool, and that as Prometheus text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.runtime.chunk import Chunk
from octavo.runtime.kv_cache import PagePool, PageState
from octavo.runtime.paged_memory import PagedMemory, PageTable
from octavo.runtime.scheduler import Scheduler


@dataclass
class EngineStats:
    """Counts since the engine was made. seconds is the time spent in steps.

    prompt_tokens    of requests whose first token was generated
    computed_tokens  all that went through the model, with what preemption made it compute again; prefill_tokens
                     of them were not the newest token of an answer
    drafted_tokens   by a proposer, verified; accepted_tokens of them were kept
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    prefill_tokens: int = 0
    num_preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, prefill time included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def count_chunks(self, chunks: Sequence[Chunk]) -> None:
        """The tokens of a step that is about to run."""
        self.computed_tokens += sum(chunk.length for chunk in chunks)
        self.prefill_tokens += sum(
            chunk.length for chunk in chunks if chunk.length > 1 or chunk.start < chunk.request.prompt_len
        )


@dataclass(frozen=True)
class Snapshot:
    """Figures of one moment between two steps. Counts are since the engine was made.

    pages          in each state, of the pool; host_pages: slots of host memory, likewise, without a null page
    page_bytes     of one page in all layers
    held_slots     token slots of pages that are private or shared, each page once; needed_slots of them hold
                   keys and values that a later token of a running request attends to
    num_running    requests; num_waiting have no pages, num_swapped have theirs in host memory
    lookup_tokens  that prefixes were looked up for; hit_tokens of them were found
    num_swaps      preemptions that went to host memory; the others are computed again
    num_evictions  cached pages that were handed out as new ones
    seconds        spent in steps; the other fields as in EngineStats
    """

    pages: Mapping[PageState, int]
    host_pages: Mapping[PageState, int]
    page_bytes: int
    held_slots: int
    needed_slots: int
    num_running: int
    num_waiting: int
    num_swapped: int
    lookup_tokens: int
    hit_tokens: int
    num_preemptions: int
    num_swaps: int
    num_evictions: int
    num_steps: int
    generated_tokens: int
    prefill_tokens: int
    seconds: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def held_pages(self) -> int:
        return self.pages[PageState.PRIVATE] + self.pages[PageState.SHARED]

    @property
    def waste(self) -> float:
        """The share of held slots that is not needed; 0 where nothing is held."""
        return 1 - self.needed_slots / self.held_slots if self.held_slots else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of looked-up tokens that was found."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def generated_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def prefill_per_second(self) -> float:
        return self.prefill_tokens / self.seconds if self.seconds else 0.0

    def since(self, earlier: "Snapshot") -> "Snapshot":
        """The same moment, with steps, tokens and seconds counted from an earlier one."""
        return replace(
            self,
            num_steps=self.num_steps - earlier.num_steps,
            generated_tokens=self.generated_tokens - earlier.generated_tokens,
            prefill_tokens=self.prefill_tokens - earlier.prefill_tokens,
            seconds=self.seconds - earlier.seconds,
        )


def take_snapshot(scheduler: Scheduler, stats: EngineStats, page_bytes: int) -> Snapshot:
    """Of the moment between two steps. Takes time by the number of requests, not of tokens."""
    memory, counts = scheduler.memory, scheduler.stats
    num_swapped = sum(request.is_swapped for request in scheduler.waiting)
    tables = [branch.table for request in scheduler.running for branch in request.branches]
    held, needed = slots(memory, tables)
    return Snapshot(
        pages=memory.pool.count(),
        host_pages=_without_null(memory.host),
        page_bytes=page_bytes,
        held_slots=held,
        needed_slots=needed,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) - num_swapped,
        num_swapped=num_swapped,
        lookup_tokens=counts.lookup_tokens,
        hit_tokens=counts.hit_tokens,
        num_preemptions=counts.num_preemptions,
        num_swaps=counts.num_swaps,
        num_evictions=memory.num_evicted,
        num_steps=stats.num_steps,
        generated_tokens=stats.generated_tokens,
        prefill_tokens=stats.prefill_tokens,
        seconds=stats.seconds,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
    )


def _without_null(pool: PagePool) -> dict[PageState, int]:
    return {state: count for state, count in pool.count().items() if state is not PageState.NULL}


def slots(memory: PagedMemory, tables: Sequence[PageTable]) -> tuple[int, int]:
    """(held, needed) token slots of a pool whose pages only these tables hold; each page counts once.

    A slot is needed if it holds a token that is computed and that the next token of a table attends to. So the
    rest of a last page is not, nor is room for tokens yet to compute, nor what a window slid past in its first
    page.
    """
    num_held = memory.pool.capacity - memory.pool.num_free
    filled = _needed_masks(memory, tables)
    num_full = num_held - len(filled)
    needed = num_full * memory.page_size + sum(mask.bit_count() for mask in filled.values())
    return num_held * memory.page_size, needed


def _needed_masks(memory: PagedMemory, tables: Sequence[PageTable]) -> dict[int, int]:
    """For each page that some table needs in part: a bit for each of its slots that any table needs."""
    size = memory.page_size
    masks: dict[int, int] = {}
    rows = [
        (row, _first_needed(window, table.num_tokens), table.num_tokens)
        for table in tables
        for window, row in zip(memory.windows, table.groups, strict=True)
    ]
    for row, first, end in rows:
        heads = [first // size] if first % size and first < end else []
        for index in {*heads, *range(end // size, len(row))}:
            masks[row[index]] = masks.get(row[index], 0) | _mask(index, first, end, size)
    shared = {page for page in masks if memory.pool.is_shared(page)}
    if shared:  # another table may need more of it, perhaps all
        for row, first, end in rows:
            for page in shared.intersection(row):
                masks[page] |= _mask(row.index(page), first, end, size)
    return masks


def _first_needed(window: int | None, num_tokens: int) -> int:
    """The first position that the next token attends to."""
    return 0 if window is None else max(0, num_tokens - window + 1)


def _mask(index: int, first: int, end: int, size: int) -> int:
    """Bits of the slots of page `index` that hold positions first : end."""
    low, high = (min(max(position - index * size, 0), size) for position in (first, end))
    return (1 << high) - (1 << low) if high > low else 0


def prometheus_text(snapshot: Snapshot) -> str:
    """A snapshot in Prometheus' text format 0.0.4. Rates are for the reader to take, from what ends in _total."""
    s = snapshot
    requests = {"running": s.num_running, "waiting": s.num_waiting, "swapped": s.num_swapped}
    preemptions = {"swap": s.num_swaps, "recompute": s.num_preemptions - s.num_swaps}
    tokens = {"generated": s.generated_tokens, "prefill": s.prefill_tokens}
    drafts = {"drafted": s.drafted_tokens, "accepted": s.accepted_tokens}
    pages = {state.value: count for state, count in s.pages.items()}
    slots_of_host = {state.value: count for state, count in s.host_pages.items()}
    families = [
        _family("pages", "gauge", "KV pages of the pool by state.", pages, "state"),
        _family("host_pages", "gauge", "Slots for KV pages in host memory by state.", slots_of_host, "state"),
        _family("page_bytes", "gauge", "Bytes of a KV page in all layers.", s.page_bytes),
        _family("held_slots", "gauge", "Token slots of held pages, each page once.", s.held_slots),
        _family("needed_slots", "gauge", "Held slots that a later token attends to.", s.needed_slots),
        _family("waste_ratio", "gauge", "Share of held slots that is not needed.", s.waste),
        _family("requests", "gauge", "Unfinished requests by state.", requests, "state"),
        _family(
            "prefix_lookup_tokens_total", "counter", "Tokens looked up in the prefix cache.", s.lookup_tokens
        ),
        _family("prefix_hit_tokens_total", "counter", "Tokens found in the prefix cache.", s.hit_tokens),
        _family("preemptions_total", "counter", "Requests that gave way, by where to.", preemptions, "to"),
        _family(
            "evictions_total", "counter", "Cached pages that were taken for new tokens.", s.num_evictions
        ),
        _family("tokens_total", "counter", "Tokens generated, and computed before that.", tokens, "kind"),
        _family("draft_tokens_total", "counter", "Drafted tokens, and those accepted.", drafts, "kind"),
        _family("steps_total", "counter", "Steps that ran.", s.num_steps),
        _family("step_seconds_total", "counter", "Seconds spent in steps.", s.seconds),
    ]
    return "".join(line for lines in families for line in lines)


def _family(
    name: str, kind: str, text: str, value: float | Mapping[str, float], label: str | None = None
) -> Iterable[str]:
    full = f"octavo_{name}"
    yield f"# HELP {full} {text}\n"
    yield f"# TYPE {full} {kind}\n"
    if isinstance(value, Mapping):
        for each, number in value.items():
            yield f'{full}{{{label}="{each}"}} {number!r}\n'
    else:
        yield f"{full} {value!r}\n"
