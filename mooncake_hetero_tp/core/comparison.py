"""The differences between a producer rank's table and a consumer rank's, field by field.

Everything that differs is listed at once, so that an operator mends a deployment in one go and never learns
of the second difference from the second start. A pair is refused here, before the first byte moves: the
public threads behind these rules served wrong text with HTTP 200 instead (vllm#49612: the compatibility hash
passed although block sizes differed; vllm#55523: replication taken for a size error; vllm#49230: a draft
model on one side only).

Replication, head slices and block sizes are no reason to refuse: the plan converts them. Nothing here
compares byte lengths of pages. What makes one region impossible to copy is the plan's own rule
(`core/plan.py`), so that the handshake and the plan cannot disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from mooncake_hetero_tp.core.pairing import RegionPair, make_pair_plan
from mooncake_hetero_tp.core.plan import collapse, cuts_between_units, pair_mismatches
from mooncake_hetero_tp.core.regions import Group, RankTable, Region, intersect
from mooncake_hetero_tp.types import Mismatch, Severity

T = TypeVar("T")

TINY_RUN_BYTES = 16 * 1024
"""Below this a descriptor costs more than its bytes: Mooncake's TCP transport falls from 1.6 GB/s at 32 KiB
and more to 0.6 at 16 KiB (measured, 2 cores), and TensorRT-LLM's bounce path starts at the same size."""

ABSENT = "(absent)"


def compare(producer: RankTable, consumer: RankTable) -> tuple[Mismatch, ...]:
    """All differences between two ranks, of every severity; both tables must be valid by themselves.

    A difference that many layers share is told once. A layer that one of several pipeline stages lacks is no
    difference: whether another stage has it, only the cover knows (`plan_pulls`).
    """
    pairs = pair_regions(producer, consumer)
    found = (
        *_compare_models(producer, consumer),
        *(difference for rule in TABLE_RULES for difference in rule.check(producer, consumer)),
        *(difference for rule in ONE_RANK_RULES for difference in rule.check_one(producer, consumer)),
        *_compare_declarations(producer, consumer),
        *_compare_groups(producer, consumer, pairs),
        *_compare_names(producer, consumer),
        *_missing_layers(producer, consumer),
        *(difference for pair in pairs for difference in _compare_regions(pair, producer, consumer)),
    )
    if not any(difference.severity is Severity.REFUSE for difference in found):
        found = (*found, *_compare_layouts(producer, consumer, pairs))
    return collapse(found)


# --- what is compared, and what to say -------------------------------------------------------------------------------


class Words(NamedTuple):
    """What to say of a difference in `field`."""

    field: str
    severity: Severity
    effect: str
    remedy: str

    def mismatch(self, producer: object, consumer: object, layer: str | None = None) -> Mismatch:
        return Mismatch(self.field, str(producer), str(consumer), self.severity, self.effect, self.remedy, layer)


class Rule(NamedTuple, Generic[T]):
    """A property of a record that is compared as it stands."""

    read: Callable[[T], object]
    words: Words

    def check(self, producer: T, consumer: T) -> Iterator[Mismatch]:
        ours, theirs = self.read(producer), self.read(consumer)
        if ours != theirs:
            yield self.words.mismatch(ours, theirs)

    def check_one(self, producer: T, consumer: T) -> Iterator[Mismatch]:
        """The same, where equal values do not help unless they are 1."""
        ours, theirs = self.read(producer), self.read(consumer)
        if (ours, theirs) != (1, 1):
            yield self.words.mismatch(ours, theirs)


_SAME_MODEL = "serve the same model with the same cache settings on both engines"
_SAME_DRAFT = "give both engines the same model, speculative and hybrid-cache settings"
_NOTHING = "nothing to do"

_INTERLEAVED = "each rank holds some of a request's tokens only, which are not mapped to those of the other side"
_CONTEXT_SIZES: tuple[tuple[str, Callable[[RankTable], int]], ...] = (
    ("decode_context_parallel_size", lambda table: table.dcp_size),
    ("prefill_context_parallel_size", lambda table: table.pcp_size),
)

TABLE_RULES: tuple[Rule[RankTable], ...] = (
    Rule(lambda table: table.tp_size, Words("tp", Severity.NOTE, "each rank reads the units it holds", _NOTHING)),
    Rule(lambda table: table.pp_size, Words("pp", Severity.NOTE, "layers are paired by name", _NOTHING)),
    Rule(
        lambda table: len(table.groups),
        Words("groups", Severity.REFUSE, "block ids, one list per KV cache group, cannot be matched", _SAME_DRAFT),
    ),
)
ONE_RANK_RULES: tuple[Rule[RankTable], ...] = tuple(
    Rule(read, Words(field, Severity.REFUSE, _INTERLEAVED, f"set --{field.replace('_', '-')} 1 on both engines"))
    for field, read in _CONTEXT_SIZES
)
"""What must be 1 on both sides, not only equal."""
GROUP_RULES: tuple[Rule[Group], ...] = (
    Rule(
        lambda group: group.kind,
        Words("kind", Severity.REFUSE, "pages of one kind do not hold what those of the other do", _SAME_DRAFT),
    ),
    Rule(
        lambda group: group.block_size,
        Words("block_size", Severity.NOTE, "pages are mapped by token range", _NOTHING),
    ),
    Rule(
        lambda group: group.kernel_block_size,
        Words("kernel_block_size", Severity.NOTE, "pages are mapped by token range", _NOTHING),
    ),
)
ENCODING = Words("encoding", Severity.NOTE, "both are known and converted on the way", _NOTHING)
LAYOUT = Words("layout", Severity.NOTE, "converted on the way", _NOTHING)
DRAFT_NOT_LOADED = Words(
    "draft layers",
    Severity.NOTE,
    "not loaded; answers stay right",
    "give both engines the same draft model for as many accepted drafts as one engine has",
)
NOBODY_FILLS = Words("layers", Severity.REFUSE, "the consumer would decode from a cache that nobody fills", _SAME_DRAFT)
NOBODY_READS = Words("layers", Severity.REFUSE, "the consumer computes with another set of layers", _SAME_DRAFT)
COMPONENTS = Words("components", Severity.REFUSE, "a part of this layer's cache would stay empty", _SAME_MODEL)
OCCURRENCES = Words(
    "occurrences",
    Severity.REFUSE,
    "layers are paired by name, and this one does not say which is meant",
    "give every cached layer a name of its own",
)
UNITS = Words("units", Severity.REFUSE, "the two sides count a different number of KV heads", _SAME_MODEL)
OPAQUE_CUT = Words(
    "unit_order",
    Severity.REFUSE,
    "a page of unknown inner order is cut by units only where they are its outermost axis",
    "use a head-major layout or the same TP size on both engines, or a backend this package knows",
)


def _declared(backend: str) -> Words:
    effect = "one backend writes its pages in one way, so one of the two declarations is wrong"
    remedy = f"declare {backend} alike, and as it is, on both engines"
    return Words(f"backend_encodings.{backend}", Severity.REFUSE, effect, remedy)


def _fragments(run_bytes: int, token_major: Sequence[str]) -> Words:
    head_major = f"use a head-major layout instead of {' and '.join(token_major)} (VLLM_KV_CACHE_LAYOUT)"
    larger = "use larger, equal blocks on both engines"
    return Words(
        "layout",
        Severity.STAGING,
        f"pages fall into copies of {run_bytes} bytes, each a descriptor of its own",
        f"{head_major} or {larger}" if token_major else larger,
    )


# --- comparisons -----------------------------------------------------------------------------------------------------


def _compare_models(producer: RankTable, consumer: RankTable) -> Iterator[Mismatch]:
    for name in dict.fromkeys((*producer.model, *consumer.model)):
        ours, theirs = producer.model.get(name, ABSENT), consumer.model.get(name, ABSENT)
        if ours != theirs:
            effect = "the two engines do not run the same model in the same way"
            remedy = f"start both engines with the same model and the same {name}"
            yield Words(f"model.{name}", Severity.REFUSE, effect, remedy).mismatch(ours, theirs)


def _compare_declarations(producer: RankTable, consumer: RankTable) -> Iterator[Mismatch]:
    """Two declarations of one backend. Of a backend that one side declares the other may have no layer."""
    for backend in sorted(producer.declared_encodings.keys() & consumer.declared_encodings.keys()):
        ours, theirs = producer.declared_encodings[backend], consumer.declared_encodings[backend]
        if ours != theirs:
            yield _declared(backend).mismatch(ours, theirs)


def _compare_groups(producer: RankTable, consumer: RankTable, pairs: Sequence[RegionPair]) -> Iterator[Mismatch]:
    for ours, theirs in group_pairs(producer, consumer, pairs):
        for rule in GROUP_RULES:
            for found in rule.check(ours, theirs):
                yield msgspec.structs.replace(found, field=f"{found.field} of group {theirs.index}")


def _compare_names(producer: RankTable, consumer: RankTable) -> Iterator[Mismatch]:
    """Names that do not say which region is meant, and layers of which one side holds only a part."""
    ours, theirs = _components(producer), _components(consumer)
    for layer in dict.fromkeys((*theirs, *ours)):
        mine, other = ours.get(layer, Counter()), theirs.get(layer, Counter())
        if max((*mine.values(), *other.values())) > 1:
            yield OCCURRENCES.mismatch(_times(mine), _times(other), layer)
        if mine and other and set(mine) != set(other):
            yield COMPONENTS.mismatch(_names(mine), _names(other), layer)


def _missing_layers(producer: RankTable, consumer: RankTable) -> Iterator[Mismatch]:
    """Layers that one side lacks for certain: an engine without pipeline stages shows all it has."""
    ours, theirs = _components(producer), _components(consumer)
    if producer.pp_size == 1:
        for layer in (layer for layer in theirs if layer not in ours):
            words = DRAFT_NOT_LOADED if layer in consumer.draft_layers else NOBODY_FILLS
            yield words.mismatch(ABSENT, _names(theirs[layer]), layer)
    if consumer.pp_size == 1:
        for layer in (layer for layer in ours if layer not in theirs):
            words = DRAFT_NOT_LOADED if layer in producer.draft_layers else NOBODY_READS
            yield words.mismatch(_names(ours[layer]), ABSENT, layer)


def _compare_regions(pair: RegionPair, producer: RankTable, consumer: RankTable) -> Iterator[Mismatch]:
    ours, theirs = pair.producer, pair.consumer
    yield from pair_mismatches(consumer, theirs, producer, ours)
    if pair.cuts and not cuts_between_units(pair):
        yield OPAQUE_CUT.mismatch(_unit_order(ours), _unit_order(theirs), theirs.name)
    if not pair.whole_pages and ours.encoding != theirs.encoding:
        yield ENCODING.mismatch(ours.encoding, theirs.encoding, theirs.name)
    mine, other = _last_unit(ours), _last_unit(theirs)
    if (producer.tp_size == 1 and other > mine) or (consumer.tp_size == 1 and mine > other):
        yield UNITS.mismatch(
            f"units up to {mine} at TP{producer.tp_size}", f"units up to {other} at TP{consumer.tp_size}", theirs.name
        )


def _compare_layouts(producer: RankTable, consumer: RankTable, pairs: Sequence[RegionPair]) -> Iterator[Mismatch]:
    paged = [pair for pair in pairs if not consumer.groups[pair.consumer.group].is_state]
    pages = [page for page in page_runs(producer, consumer, paged) if page.runs > page.parts]
    shortest = min((page.shortest_bytes for page in pages), default=TINY_RUN_BYTES)
    if shortest < TINY_RUN_BYTES:
        found = _fragments(shortest, _token_major(producer, consumer, paged))
        yield found.mismatch(*(f"{table.layout} at TP{table.tp_size}" for table in (producer, consumer)))
    elif producer.layout != consumer.layout:
        yield LAYOUT.mismatch(producer.layout, consumer.layout)


def _token_major(producer: RankTable, consumer: RankTable, pairs: Sequence[RegionPair]) -> list[str]:
    """Names of the layouts that lay tokens before heads, by their strides."""
    regions = [(producer.layout, pair.producer) for pair in pairs] + [
        (consumer.layout, pair.consumer) for pair in pairs
    ]
    return list(dict.fromkeys(name for name, region in regions if region.unit.stride < region.token.stride))


# --- reading tables --------------------------------------------------------------------------------------------------


def pair_regions(producer: RankTable, consumer: RankTable) -> list[RegionPair]:
    """The (layer, component)s that both sides hold, in the consumer's order, with the units both hold."""
    held = {(region.layer, region.component): region for region in producer.regions}
    pairs = []
    for region in consumer.regions:
        source = held.get((region.layer, region.component))
        if source is not None:
            pairs.append(RegionPair(region, source, tuple(intersect(region.spans, source.spans))))
    return pairs


def group_pairs(producer: RankTable, consumer: RankTable, pairs: Sequence[RegionPair]) -> Iterator[tuple[Group, Group]]:
    """The (producer group, consumer group)s that hold the same layers; each once."""
    for ours, theirs in dict.fromkeys((pair.producer.group, pair.consumer.group) for pair in pairs):
        yield producer.groups[ours], consumer.groups[theirs]


class PageRuns(NamedTuple):
    """The contiguous copies that one layer's page takes, between pages of two ranks."""

    runs: int
    parts: int
    """Copies there would be if each unit cut of each component were contiguous."""
    shortest_bytes: int


def page_runs(producer: RankTable, consumer: RankTable, pairs: Sequence[RegionPair]) -> Iterator[PageRuns]:
    """What it takes to copy as many tokens as fit a page of both sides, for one layer of each geometry."""
    plan = make_pair_plan(consumer, producer, [pair for pair in pairs if pair.cuts])
    for same in plan.classes:
        page = same.one_member(min(same.geometry.src.page_tokens, same.geometry.dst.page_tokens))
        yield PageRuns(page.length.size, len(same.geometry.parts), int(page.length.min()))


def _components(table: RankTable) -> dict[str, Counter[str]]:
    components: dict[str, Counter[str]] = {}
    for region in table.regions:
        components.setdefault(region.layer, Counter())[region.component] += 1
    return components


def _names(components: Counter[str]) -> str:
    return ", ".join(sorted(components))


def _times(components: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(components.items())) or ABSENT


def _last_unit(region: Region) -> int:
    return max((span.global_start + span.count - 1 for span in region.spans), default=0)


def _unit_order(region: Region) -> str:
    """How the units of a page lie, for messages."""
    held = ", ".join(f"{span.global_start}..{span.global_start + span.count - 1}" for span in region.spans)
    return f"units {held}, {region.unit.stride} bytes apart, tokens {region.token.stride}"
