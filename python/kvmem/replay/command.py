"""The command `kvmem replay`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmem._shown import shown
from kvmem.replay import options as limits
from kvmem.replay.given import Way, way_of
from kvmem.replay.options import HitRule, ReplayError, ReplayOptions
from kvmem.replay.result import ReplayResult
from kvmem.replay.trace import Request, read_trace
from kvmem.replay.workload import DEFAULT_HOST_BLOCKS, DEFAULT_REQUESTS, generate_chat

HELP = """Replay a request trace; where bytes move, every restored block is verified.

Blocks that are on the host are restored, the others are computed and offloaded; the host tier
evicts the least recently used. With --device virtual the links are modelled and all times are
virtual, so that the same seed gives the same table; with --no-move-bytes no bytes move there, and
terabytes fit. Exits 1 if a restored block differed, a host block leaked or a
transfer did not end exactly once, 2 if it could not run.

With --policy, or an option that implies it (--admit-after, --thrash, --disk, --groups), it runs on
kvmem.Cache, as an engine would. Its hits are prefixes that were delivered; each of its counters is
checked against the cache's own, and a difference exits 1 too. The disk is always real: with
--device virtual it takes no virtual time, and what is still being written may vary between runs.

With --policies nothing is moved: it counts what each eviction policy would hit at each size of the
host tier, and the prefill that saves.

Example: kvmem replay conversation_trace.jsonl --hit blocks --host-blocks 10000 --json

Example: kvmem replay conversation_trace.jsonl --host-blocks 5000 --policy lru --disk 1GiB

Example: kvmem replay conversation_trace.jsonl --policies all
"""

Trace = Annotated[
    Path | None,
    typer.Argument(help="Trace in Mooncake JSONL, 512-token blocks. Default: generated chats."),
]
Device = Annotated[
    str, typer.Option(help="Device whose memory stands for the KV cache: host or virtual.")
]
Gbps = Annotated[
    float | None,
    typer.Option(
        metavar="GBPS", help="Of one link of the virtual device, 10^9 bytes a second. Default: 25."
    ),
]
LatencyUs = Annotated[
    float | None,
    typer.Option(
        metavar="US", help="Of a copy on the virtual device, in microseconds. Default: 10."
    ),
]
MoveBytes = Annotated[
    bool,
    typer.Option(
        "--move-bytes/--no-move-bytes",
        help="Whether bytes move on the virtual device; if not, nothing is verified.",
    ),
]
HostBlocks = Annotated[
    str | None,
    typer.Option(
        metavar="N|unbounded",
        help="Capacity of the host tier."
        f" Default: unbounded for a trace, {DEFAULT_HOST_BLOCKS} for generated chats.",
    ),
]
BlockBytes = Annotated[
    str,
    typer.Option(
        metavar="BYTES", help=f"Bytes of a block, a multiple of {limits.BLOCK_BYTES_UNIT}."
    ),
]
Hit = Annotated[
    HitRule,
    typer.Option(
        help="What is restored: the contiguous prefix, as in an engine, or every present block."
    ),
]
AbortRate = Annotated[
    float, typer.Option(metavar="P", help="Share of requests cancelled at a random stage, 0 to 1.")
]
Corrupt = Annotated[
    int, typer.Option(metavar="N", help="Restored blocks to damage first; each must be caught.")
]
Concurrency = Annotated[int, typer.Option(metavar="N", help="Requests in flight at once.")]
Seed = Annotated[
    int, typer.Option(help="Of the generated chats, of aborts, of damage, of the virtual device.")
]
Limit = Annotated[
    int | None,
    typer.Option(
        metavar="N", help=f"Only the first N requests; {DEFAULT_REQUESTS} chats are generated."
    ),
]
Policies = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES|all",
        help="Compare eviction policies instead: lru, arc, gdsf; gdsf+cost, where a block is worth"
        " its predicted prefill, and gdsf+prompt, the mean of its prompt.",
    ),
]
Capacities = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Sizes for --policies, in blocks. Default: 1, 5, 10, 25, 50 % of the distinct blocks.",
    ),
]
PrefillTokens = Annotated[
    float | None,
    typer.Option(
        metavar="RATE",
        help="For --policies and --policy: prefill without attention, tokens a second."
        " Default: 14925.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="lru|arc|gdsf", help="Run on a cache; what it evicts first. Default: lru."
    ),
]
AdmitAfter = Annotated[
    int | None,
    typer.Option(metavar="N", help="Of the cache: a key is stored the Nth time it is offered."),
]
Thrash = Annotated[
    float | None,
    typer.Option(
        metavar="BYTES",
        help="Of the cache: refuse stores while more bytes than this, both ways, were moved for"
        " each token that the trace has generated; until it is half of that.",
    ),
]
Groups = Annotated[
    str | None,
    typer.Option(
        metavar="full[+window:N][+state]",
        help="Of the cache: layers of full attention, and with them small ones of which a hit"
        " needs the last N blocks, or the last alone. Each group has --host-blocks. Default: full.",
    ),
]
Disk = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES", help="Of the cache: a disk tier behind the host's, of real files."
    ),
]
DiskPath = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Of --disk; what is there is found, and stays. Default: a temporary one.",
    ),
]
DiskWrite = Annotated[
    str | None,
    typer.Option(
        metavar="through|back",
        help="Of --disk: write each block at once, or the oldest when host memory fills up."
        " Default: through.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.html", help="Draw occupancy, queue depth and latency over the run."),
]


def replay(
    context: typer.Context,
    trace: Trace = None,
    device: Device = "host",
    gbps: Gbps = None,
    latency_us: LatencyUs = None,
    move_bytes: MoveBytes = True,
    host_blocks: HostBlocks = None,
    block_bytes: BlockBytes = "16KiB",
    hit: Hit = "prefix",
    abort_rate: AbortRate = 0.0,
    corrupt: Corrupt = 0,
    concurrency: Concurrency = 4,
    seed: Seed = 0,
    limit: Limit = None,
    policies: Policies = None,
    capacities: Capacities = None,
    prefill_tokens_per_s: PrefillTokens = None,
    policy: Policy = None,
    admit_after: AdmitAfter = None,
    thrash: Thrash = None,
    groups: Groups = None,
    disk: Disk = None,
    disk_path: DiskPath = None,
    disk_write: DiskWrite = None,
    json_output: Json = False,
    plot: Plot = None,
) -> None:
    with _failures_in_words():
        limits.expect_limit(limit)
        way = way_of(_given(context))
        if way is Way.policies:
            assert policies is not None
            # No device is used, so either that a replay runs on gives the same table.
            if device not in ("host", "virtual"):
                raise ReplayError(f"--device: {shown(device)} is neither host nor virtual")
            requests, source = _requests(trace, limit, seed), _source(trace, seed)
            _compare(requests, source, policies, capacities, prefill_tokens_per_s, json_output)
            raise typer.Exit(0)
        chosen = ReplayOptions(
            device=device,
            gbps=gbps,
            latency_us=latency_us,
            move_bytes=move_bytes,
            host_blocks=_host_blocks(host_blocks, trace),
            block_bytes=limits.parse_block_bytes(block_bytes),
            hit=hit,
            abort_rate=abort_rate,
            corrupt=corrupt,
            concurrency=concurrency,
            seed=seed,
        )
        if way is Way.plain:
            raise typer.Exit(_run(trace, limit, chosen, json_output, plot))
        of_cache = {
            "policy": policy,
            "admit_after": admit_after,
            "thrash": thrash,
            "groups": groups,
            "disk_bytes": disk,
            "disk_path": disk_path,
            "disk_write": disk_write,
            "prefill_tokens_per_s": prefill_tokens_per_s,
        }
        raise typer.Exit(_run_on_cache(trace, limit, chosen, of_cache, json_output))


@contextmanager
def _failures_in_words() -> Iterator[None]:
    """End with the status of what went wrong, and a line that says it."""
    import kvmem

    try:
        yield
    except (ReplayError, kvmem.KvmemError, MemoryError) as error:
        said = "not enough memory" if isinstance(error, MemoryError) else error
        typer.echo(f"kvmem replay: {said}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("kvmem replay: interrupted", err=True)
        raise typer.Exit(130) from None


def _given(context: typer.Context) -> set[str]:
    """Name the parameters that are not there by default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name != "DEFAULT"}


def _host_blocks(given: str | None, trace: Path | None) -> int | None:
    if given is not None:
        return limits.parse_host_blocks(given)
    return DEFAULT_HOST_BLOCKS if trace is None else None


def _run(
    trace: Path | None, limit: int | None, options: ReplayOptions, as_json: bool, plot: Path | None
) -> int:
    from kvmem.replay.engine import run_replay
    from kvmem.replay.plot import expect_plot, write_plot

    if plot is not None:
        expect_plot(plot)
    requests = _requests(trace, limit, options.seed)
    source = _source(trace, options.seed)
    with _progress(len(requests)) as advance:
        result = run_replay(requests, options, advance)
    if plot is not None:
        write_plot(result, source, plot)
    _show(result, source, as_json)
    return _status(result.faults(), result.counts.corrupted, options.corrupt)


def _run_on_cache(
    trace: Path | None,
    limit: int | None,
    options: ReplayOptions,
    of_cache: dict[str, Any],
    as_json: bool,
) -> int:
    from kvmem.replay.cache_engine import run_cache_replay
    from kvmem.replay.cache_options import CacheReplayOptions, parse_disk_bytes
    from kvmem.replay.cache_result import make_table

    given = {name: value for name, value in of_cache.items() if value is not None}
    if "disk_bytes" in given:
        given["disk_bytes"] = parse_disk_bytes(given["disk_bytes"])
    chosen = CacheReplayOptions(options, **given)
    requests, source = _requests(trace, limit, options.seed), _source(trace, options.seed)
    with _progress(len(requests)) as advance:
        result = run_cache_replay(requests, chosen, advance)
    if as_json:
        typer.echo(json.dumps({"source": source} | result.to_json()))
    else:
        from rich.console import Console

        Console().print(make_table(result, source))
    return _status(result.faults(), result.counts.corrupted, options.corrupt)


def _source(trace: Path | None, seed: int) -> str:
    return trace.name if trace is not None else f"generated chats, seed {seed}"


def _compare(
    requests: list[Request],
    source: str,
    policies: str,
    capacities: str | None,
    tokens_per_second: float | None,
    as_json: bool,
) -> None:
    from kvmem.replay import policies as compared

    names = compared.parse_policies(policies)
    sizes = compared.parse_capacities(capacities)
    rate = compared.TOKENS_PER_SECOND if tokens_per_second is None else tokens_per_second
    runs = len(names) * len(sizes or compared.SHARES)
    with _progress(runs) as advance:
        results = list(compared.compare_policies(requests, names, sizes, rate, advance))
    if as_json:
        typer.echo(json.dumps(compared.to_json(results, source)))
        return
    from rich.console import Console

    Console().print(compared.make_table(results, source))


def _requests(trace: Path | None, limit: int | None, seed: int) -> list[Request]:
    if trace is not None:
        return read_trace(trace, limit)
    return generate_chat(seed, limit or DEFAULT_REQUESTS)


@contextmanager
def _progress(requests: int) -> Iterator[Callable[[int], None]]:
    """Show a bar where a person looks on; say nothing to a file or a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("replaying", total=requests)
        yield lambda started: bar.update(task, completed=started)


def _show(result: ReplayResult, source: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"source": source} | result.to_json()))
        return
    from rich.console import Console

    from kvmem.replay.table import make_table

    Console().print(make_table(result, source))


def _status(faults: list[str], corrupted: int, wanted: int) -> int:
    if faults:
        return 1
    if corrupted < wanted:
        raise ReplayError(
            f"--corrupt: {wanted} blocks asked for, only {corrupted} could be damaged:"
            " no more were restored"
        )
    return 0
